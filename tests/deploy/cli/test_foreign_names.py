"""A run folder whose name is not UTF-8: commands work, or end in one line where a library takes no such path."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.support.commands import run_cli

NAME = os.fsdecode(b"caf\xe9")
"""As a Latin-1 system wrote it."""
SHOWN = "caf\\xe9"


@pytest.fixture
def preset(tmp_path: Path, tiny_sd3: Path) -> str:
    (tmp_path / "prompts.txt").write_text("red circle\nblue square\n")
    tree = {
        "iterations": 1,
        "model": {"path": str(tiny_sd3), "max_sequence_length": 2},
        "data": {"train": str(tmp_path / "prompts.txt"), "heldout": str(tmp_path / "prompts.txt")},
        "sampling": {"steps": 3},
        "group": {"size": 2, "per_iteration": 2},
        "rewards": {"dark": {"scorer": "tests.support.rewards.dark:Dark"}},
        "evaluation": {"component": "reward", "images_per_prompt": 1, "steps": 2},
    }
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump(tree))
    return str(tmp_path / "preset.yaml")


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
