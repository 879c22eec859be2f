"""A run folder whose name is not UTF-8: commands work, or end in one line where a library takes no such path."""

import json
import os
from pathlib import Path

import pytest

from tests.support.commands import run_cli
from tests.support.runs.presets import small_preset

NAME = os.fsdecode(b"caf\xe9")
"""As a Latin-1 system wrote it."""
SHOWN = "caf\\xe9"


@pytest.fixture
def preset(tmp_path: Path, tiny_sd3: Path) -> str:
    return str(small_preset(tmp_path, tiny_sd3, scorer="tests.support.rewards.dark:Dark"))


def test_a_run_whose_name_is_not_utf_8_is_trained_shown_drawn_from_and_forked(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, fork, page = str(tmp_path / NAME), str(tmp_path / "fork"), tmp_path / "page.html"
    assert run_cli(monkeypatch, "train", preset, "--local", "--run", run) == 0
    assert "ERROR" not in (Path(run) / "run.log").read_text(), "the board too takes the name"
    assert run_cli(monkeypatch, "report", run, "--out", str(page)) == 0
    assert SHOWN in page.read_text(encoding="utf-8")
    assert run_cli(monkeypatch, "generate", run, "red circle", "--count", "1", "--out", str(tmp_path / "drawn")) == 0
    for iterations in ("1", "2"):
        words = ("--run", fork, "--fork", run, f"iterations={iterations}")
        assert run_cli(monkeypatch, "train", preset, "--local", *words) == 0
    assert json.loads((Path(fork) / "origin.json").read_text())["fork"]["run"] == str(tmp_path / SHOWN)
    capsys.readouterr()
    for words in ((run, str(tmp_path / "model")), (fork, str(tmp_path / NAME / "model"))):
        assert run_cli(monkeypatch, "export", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert SHOWN in line and line.endswith("must be a UTF-8 path, since diffusers takes no other: rename it")
