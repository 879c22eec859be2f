"""Editing benchmarks become prompt files with images, from a local server in place of GitHub and the hub."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.tools.prompts import edits
from deploy.tools.prompts.fetched import Source, fetch
from deploy.tools.prompts.sets import SETS, fetch_set
from protocol.config.run import DataConfig
from protocol.errors import PromptError
from protocol.ground.condition_images import read_condition
from protocol.prompts import read_prompts
from rewards.images import encode_png
from tests.support.services.files import Server, serving

SHOWN = [np.full((4, 6, 3), level, np.uint8) for level in (10, 20, 30)]
PNGS = [encode_png(image) for image in SHOWN]


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def prompts_of(path: Path) -> list[Any]:
    found = read_prompts(DataConfig(train=str(path), heldout=str(path), tags=()), str(path))
    return [
        (each.text, each.metadata, *(int(read_condition(condition)[0, 0, 0]) for condition in each.conditions))
        for each in found
    ]


@pytest.fixture
def imgedit_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    instructions = {
        "1082": {"id": "animal/1.jpg", "prompt": "Make it blue.", "edit_type": "adjust"},
        "7": {"id": "compose/human/6.jpg", "prompt": "Add a hat.", "edit_type": "compose"},
    }
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in (("animal/1.jpg", PNGS[0]), ("compose/human/6.jpg", PNGS[1]), ("other.jpg", b"no")):
            member = tarfile.TarInfo(f"Benchmark/singleturn/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    told = json.dumps(instructions).encode()
    with serving({"/basic_edit.json": told, "/Benchmark.tar": archive.getvalue()}) as url:
        monkeypatch.setattr(edits, "IMGEDIT_EDITS", Source(f"{url}/basic_edit.json", sha256=sha256_of(told)))
        monkeypatch.setattr(edits, "IMGEDIT_IMAGES", Source(f"{url}/Benchmark.tar"))
        yield


@pytest.mark.usefixtures("imgedit_files")
def test_imgedit_s_archive_is_fetched_on_and_its_hash_is_recorded(tmp_path: Path) -> None:
    fetch(edits.IMGEDIT_EDITS, tmp_path / "imgedit")
    Server.breaks_after = 600
    with pytest.raises(PromptError, match="run the command again to go on"):
        list(fetch_set("imgedit", SETS["imgedit"], tmp_path))
    ((key, path, known),) = fetch_set("imgedit", SETS["imgedit"], tmp_path)
    assert key == "heldout" and "recorded in Benchmark.tar.sha256" in known
    assert prompts_of(path) == [
        ("Make it blue.", {"tag": "adjust"}, 10),
        ("Add a hat.", {"tag": "compose"}, 20),
    ]
    assert not (tmp_path / "imgedit" / "images" / "other.jpg").exists()
    asked = len(Server.asked)
    list(fetch_set("imgedit", SETS["imgedit"], tmp_path))
    assert len(Server.asked) == asked, "made once"
    path.unlink()
    Path(tmp_path / "imgedit" / "Benchmark.tar").write_bytes(b"other")
    with pytest.raises(PromptError, match="must have the sha256 of the first fetch .*: the file is removed"):
        list(fetch_set("imgedit", SETS["imgedit"], tmp_path))


def test_gedit_s_arrow_files_are_those_that_the_hub_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [
        {"task_type": "color_alter", "key": "a1", "instruction": "Make it red.", "instruction_language": "en"},
        {"task_type": "subject-add", "key": "b2", "instruction": "加一顶帽子", "instruction_language": "cn"},
        {"task_type": "color_alter", "key": "a1", "instruction": "变红", "instruction_language": "cn"},
    ]
    for row, png in zip(rows, PNGS, strict=True):
        row["input_image_raw"] = row["input_image"] = {"bytes": png, "path": None}
        row["Intersection_exist"] = True
    files = {}
    for name, part in (("data-00000-of-00002.arrow", rows[:2]), ("data-00001-of-00002.arrow", rows[2:])):
        sink = io.BytesIO()
        table = pyarrow.Table.from_pylist(part)
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        files[f"/{name}"] = sink.getvalue()
    listing = [{"type": "file", "path": "README.md", "oid": "0"}]
    listing += [{"path": name[1:], "lfs": {"oid": sha256_of(data)}} for name, data in files.items()]
    files["/tree"] = json.dumps(listing).encode()
    with serving(files) as url:
        monkeypatch.setattr(edits, "GEDIT_FILES", replace(edits.GEDIT_FILES, url=f"{url}/tree"))
        monkeypatch.setattr(edits, "GEDIT_DATA", url)
        ((_, path, known),) = fetch_set("gedit", SETS["gedit"], tmp_path)
        assert "recorded in files.json.sha256" in known
        assert prompts_of(path) == [
            ("Make it red.", {"tag": "en/color_alter"}, 10),
            ("加一顶帽子", {"tag": "cn/subject-add"}, 20),
            ("变红", {"tag": "cn/color_alter"}, 30),
        ]
        assert not list((tmp_path / "gedit").glob("*.arrow"))
        Server.files["/data-00000-of-00002.arrow"] = b"other"
        with pytest.raises(PromptError, match=r"00000-of-00002.arrow must have the sha256 .* is removed"):
            list(fetch_set("gedit", SETS["gedit"], tmp_path / "again"))
        Server.files["/tree"] = b"[]"
        with pytest.raises(PromptError, match="must name Arrow files, got none"):
            list(fetch_set("gedit", SETS["gedit"], tmp_path / "empty"))


def test_the_files_of_the_releases_are_pinned() -> None:
    for source in (edits.GEDIT_WORDS, edits.IMGEDIT_WORDS, edits.IMGEDIT_EDITS):
        assert len(source.sha256 or "") == 64 and source.url.startswith("https://")
