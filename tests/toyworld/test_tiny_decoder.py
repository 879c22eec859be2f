"""The recipe of the tiny decoder: it learns its teacher's images, and the shipped one has learnt them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from rich.console import Console

from benchmarks.pretraining import autoencoder, tiny_decoder
from benchmarks.pretraining.dataset import draw_examples
from benchmarks.pretraining.training import Stage
from deploy.presets import load_config
from flow.models.completed import completed
from flow.models.load import load_backbone
from tests.support.paths import ROOT

HERE = ROOT / "toyworld"


@pytest.fixture(scope="module")
def teacher() -> AutoencoderTiny:
    return AutoencoderTiny.from_pretrained(HERE / "model" / "vae", torch_dtype=torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def pairs(teacher: AutoencoderTiny) -> tuple[torch.Tensor, np.ndarray]:
    latents = autoencoder.normalised_latents(teacher, draw_examples(32, seed=9).images)
    return tiny_decoder.draw_pairs(teacher, latents, count=128, seed=9)


def error(model: AutoencoderTiny, pairs: tuple[torch.Tensor, np.ndarray]) -> float:
    with torch.no_grad():
        drawn = autoencoder.to_images(model.decode(pairs[0], return_dict=False)[0])
    return float(np.abs(drawn.astype(float) - pairs[1]).mean())


@pytest.mark.whole
def test_it_learns_and_repeats_itself(
    pairs: tuple[torch.Tensor, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_decoder, "BATCH", 4)
    models = [
        tiny_decoder.distil(*pairs, Stage(name=name, steps=30, seed=0, folder=tmp_path, console=Console(quiet=True)))
        for name in ("one", "other")
    ]
    assert error(models[0], pairs) < 0.9 * error(tiny_decoder.build(), pairs)
    assert all(
        torch.equal(one, other) for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )


def test_the_shipped_one_gives_its_teachers_images(pairs: tuple[torch.Tensor, np.ndarray]) -> None:
    model = AutoencoderTiny.from_pretrained(HERE / "tiny_decoder", torch_dtype=torch.float32)
    assert error(model, pairs) < 5
    assert (model.config["scaling_factor"], model.config["shift_factor"]) == (1.0, 0.0)


def test_the_toy_world_takes_the_shipped_one() -> None:
    """Its own VAE is an AutoencoderTiny too, not an AutoencoderKL as those of large models."""
    config = load_config("toy_geneval", overrides=["model.tiny_decoder=pkg://toyworld/tiny_decoder"])
    assert load_backbone(completed(config).model, device="cpu").tiny_decoder is not None
