"""Images that a prompt file names by address: a copy of the file names them by path."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from protocol.config.run import DataConfig
from protocol.prompts import read_prompts
from tests.support.commands import run_cli
from tests.support.services.files import Server, serving


def test_a_copy_of_the_file_names_fetched_images_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, "PNG")
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "mine" / "b.png")
    prompts, out = tmp_path / "mine" / "edits.jsonl", tmp_path / "here.jsonl"
    with serving({"/a.png": file.getvalue(), "/no.png": b"text"}) as url:
        lines = [{"prompt": "x", "tag": "t", "images": [f"{url}/a.png", "b.png"]}, {"prompt": "y", "image": "b.png"}]
        prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for _ in range(2):
            assert run_cli(monkeypatch, "prompts", str(prompts), "--out", str(out)) == 0
        assert f"data.train={out}  (2 prompts)" in capsys.readouterr().out
        assert Server.asked == [None], "the second time it is there"
        x, y = read_prompts(DataConfig(train=str(out), heldout=""), str(out))
        assert Path(x.conditions[0].path).read_bytes() == file.getvalue()
        assert x.conditions[0].path.startswith(f"{tmp_path}/here_images/")
        assert x.metadata == {"tag": "t"}
        assert [each.sha256 for each in y.conditions] == [x.conditions[1].sha256]
        prompts.write_text(f'{{"prompt": "x", "image": "{url}/no.png"}}\n')
        assert run_cli(monkeypatch, "prompts", str(prompts), "--out", str(out)) == 2
        assert "edits.jsonl:1: image " in capsys.readouterr().err
