"""The folder from which a run is started: a scorer may leave it."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protocol.messages import Metadata, Scores
from rewards.scores import scored
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


def test_a_scorer_that_changes_the_working_folder_moves_no_results(started, monkeypatch, cli):
    said = cli.done("train", "preset.yaml", "--local", "--run", "runs/mine")
    lora = "runs/mine/checkpoints/iteration_000001/pytorch_lora_weights.safetensors"
    assert f"LoRA      {lora}\n" in said and "images    runs/mine/gallery/before_after.png\n" in said
    assert (started / lora).is_file()
    monkeypatch.chdir(started)
    assert "continuing from runs/mine/checkpoints/iteration_000001\n" in cli.done(
        "train", "--local", "--run", "runs/mine"
    )
    assert "written   scored/evaluation.json\n" in cli.done("eval", "runs/mine", "--local", "--out", "scored")
    assert (started / "scored" / "evaluation.json").is_file()
