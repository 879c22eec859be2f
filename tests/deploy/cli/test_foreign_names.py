"""A run folder whose name is not UTF-8: commands work, or end in one line where a library takes no such path."""

import json
import os
from pathlib import Path

import pytest

from tests.support.runs.presets import small_preset

NAME = os.fsdecode(b"caf\xe9")
"""As a Latin-1 system wrote it."""
SHOWN = "caf\\xe9"


@pytest.fixture
def preset(tmp_path: Path, tiny_sd3: Path) -> str:
    return str(small_preset(tmp_path, tiny_sd3, scorer="tests.support.rewards.dark:Dark"))


def test_a_run_whose_name_is_not_utf_8_is_trained_shown_drawn_from_and_forked(preset, tmp_path, cli):
    run, fork, page = str(tmp_path / NAME), str(tmp_path / "fork"), tmp_path / "page.html"
    cli.done("train", preset, "--local", "--run", run)
    assert "ERROR" not in (Path(run) / "run.log").read_text(), "the board too takes the name"
    cli.done("report", run, "--out", str(page))
    assert SHOWN in page.read_text(encoding="utf-8")
    cli.done("generate", run, "red circle", "--count", "1", "--out", str(tmp_path / "drawn"))
    for iterations in ("1", "2"):
        words = ("--run", fork, "--fork", run, f"iterations={iterations}")
        cli.done("train", preset, "--local", *words)
    assert json.loads((Path(fork) / "origin.json").read_text())["fork"]["run"] == str(tmp_path / SHOWN)
    for words in ((run, str(tmp_path / "model")), (fork, str(tmp_path / NAME / "model"))):
        line = cli.refused("export", *words)
        assert SHOWN in line and line.endswith("must be a UTF-8 path, since diffusers takes no other: rename it")
