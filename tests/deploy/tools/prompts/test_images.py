"""Images that a prompt file names by address: a copy of the file names them by path."""

import io
import json
from pathlib import Path

from PIL import Image

from protocol.config.run import DataConfig
from protocol.prompts import read_prompts
from tests.support.services.files import Server, serving


def test_a_copy_of_the_file_names_fetched_images_by_path(tmp_path, cli):
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, "PNG")
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "mine" / "b.png")
    prompts, out = tmp_path / "mine" / "edits.jsonl", tmp_path / "here.jsonl"
    with serving({"/a.png": file.getvalue(), "/no.png": b"text"}) as url:
        lines = [{"prompt": "x", "tag": "t", "images": [f"{url}/a.png", "b.png"]}, {"prompt": "y", "image": "b.png"}]
        prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for _ in range(2):
            said = cli.done("prompts", str(prompts), "--out", str(out))
            assert f"data.train={out}  (2 prompts)" in said
        assert Server.asked == [None], "the second time it is there"
        x, y = read_prompts(DataConfig(train=str(out), heldout=""), str(out))
        assert Path(x.conditions[0].path).read_bytes() == file.getvalue()
        assert x.conditions[0].path.startswith(f"{tmp_path}/here_images/")
        assert x.metadata == {"tag": "t"}
        assert [each.sha256 for each in y.conditions] == [x.conditions[1].sha256]
        prompts.write_text(f'{{"prompt": "x", "image": "{url}/no.png"}}\n')
        assert "edits.jsonl:1: image " in cli.refused("prompts", str(prompts), "--out", str(out))
