"""The recipe goes on after a kill and ends with the same weights, to the bit."""

from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.pretraining import training
from benchmarks.pretraining.shapes import ShapeRecipe, pretrain
from benchmarks.pretraining.training import WeightAverage, learning_rate
from tests.support.killed_console import KilledConsole

TINY = ShapeRecipe(seed=5, images=256, autoencoder_steps=3, transformer_steps=3, clip_steps=3)


def run(folder: Path, console: Console) -> dict[str, torch.Tensor]:
    """Pretrain in a folder; every weight of the pipeline and the CLIP by file and name."""
    pretrain(TINY, work=folder / "work", model_folder=folder / "model", clip_folder=folder / "clip", console=console)
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder)}:{name}": value for path in files for name, value in load_file(path).items()}


@pytest.mark.whole
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY_S", 0.0)
    whole = run(tmp_path / "whole", Console(quiet=True))
    for stage in ("autoencoder", "transformer", "clip"):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", KilledConsole(f"{stage}: step 2/3"))
    resumed = run(tmp_path / "killed", Console(quiet=True))
    assert whole.keys() == resumed.keys()
    assert len(whole) > 100
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_work_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    TINY.claim(tmp_path)
    TINY.claim(tmp_path)
    with pytest.raises(typer.BadParameter, match=r"seed must stay 5 in .*, got 6"):
        TINY.model_copy(update={"seed": 6}).claim(tmp_path)
    with pytest.raises(typer.BadParameter, match="transformer_steps must stay 3"):
        TINY.model_copy(update={"transformer_steps": 9}).claim(tmp_path)


def test_a_recipe_is_read_from_words() -> None:
    assert ShapeRecipe.of(["seed=5", "clip_steps=3"]) == ShapeRecipe(seed=5, clip_steps=3)
    for word, said in (("images=3", "images: .* got 3"), ("steps=3", "steps: ")):
        with pytest.raises(typer.BadParameter, match=said):
            ShapeRecipe.of([word])


def test_learning_rate_warms_up_to_its_peak_and_ends_at_a_fiftieth() -> None:
    assert learning_rate(0, 1100, peak=2.0) == pytest.approx(0.02)
    assert learning_rate(100, 1100, peak=2.0) == pytest.approx(2.0)
    assert learning_rate(600, 1100, peak=2.0) == pytest.approx(2.0 * 0.51)
    assert learning_rate(1100, 1100, peak=2.0) == pytest.approx(0.04)


def test_weight_average_follows_its_decay() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    average = WeightAverage(module, decay=0.5)
    torch.nn.init.ones_(module.weight)
    average.update(module, step=0)
    assert average.state_dict()["weight"].item() == pytest.approx(0.9)
    average.update(module, step=100)
    assert average.state_dict()["weight"].item() == pytest.approx(0.95)
