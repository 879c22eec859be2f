"""The folder from which a run is started: a scorer may leave it."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protocol.messages import Metadata, Scores
from rewards.scores import scored
from tests.support.commands import run_cli
from tests.support.runs.presets import small_preset


class Wanderer:
    """Brightness, from another working folder."""

    name, low, high = "wanderer", 0.0, 1.0

    def check(self, prompts: Sequence[object]) -> None:
        """Every prompt can be scored."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        os.chdir("/")
        return scored(images.mean((1, 2, 3)) / 255)


@pytest.fixture
def started(tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which holds a preset."""
    monkeypatch.chdir(tmp_path)
    status = {"board": "off", "trajectories": 0}
    small_preset(tmp_path, tiny_sd3, scorer=f"{__name__}:Wanderer", status=status)
    return tmp_path


def test_a_scorer_that_changes_the_working_folder_moves_no_results(
    started: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, "train", "preset.yaml", "--local", "--run", "runs/mine") == 0
    said = capsys.readouterr().out
    lora = "runs/mine/checkpoints/iteration_000001/pytorch_lora_weights.safetensors"
    assert f"LoRA      {lora}\n" in said and "images    runs/mine/gallery/before_after.png\n" in said
    assert (started / lora).is_file()
    monkeypatch.chdir(started)
    assert run_cli(monkeypatch, "train", "--local", "--run", "runs/mine") == 0
    assert "continuing from runs/mine/checkpoints/iteration_000001\n" in capsys.readouterr().out
    assert run_cli(monkeypatch, "eval", "runs/mine", "--local", "--out", "scored") == 0
    assert "written   scored/evaluation.json\n" in capsys.readouterr().out
    assert (started / "scored" / "evaluation.json").is_file()
