"""Every family against its own diffusers pipeline: embeddings, sigmas, latents after each step, images.

float32, bit for bit, except where the pipeline runs the two branches of guidance apart and we run them as one batch:
FLUX above guidance 1 may differ by rounding.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils import logging as diffusers_logging

from flow.maths.noise import normal
from flow.models.contract import Backbone
from flow.models.load import load_backbone
from flow.policy import FlowPolicy
from flow.rollout import generate
from protocol.config.model import ModelConfig
from protocol.config.sampling import SamplingConfig
from protocol.errors import ModelError
from protocol.messages import GenerateRequest, Prompt
from tests.support.pairwise import pairwise
from tests.support.worlds.drawn import ode_latents
from tests.support.worlds.pipelines import SIDES
from tests.support.worlds.tiny_models import frozen, write_flux, write_sd35

STEPS, TOKENS = 3, 6
TEXT, NEGATIVE = "a red circle", "blurry"
WRITERS: dict[str, Callable[[Path], Path]] = {
    "sd35": write_sd35,
    "sd35_without_t5": lambda folder: write_sd35(folder, has_t5=False),
    "flux_dev": write_flux,
    "flux_schnell": lambda folder: write_flux(folder, is_schnell=True),
}
FLUX = ("flux_dev", "flux_schnell")


@pytest.fixture(scope="module", params=WRITERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[name](tmp_path_factory.mktemp("models") / name)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    diffusers_logging.disable_progress_bar()
    absent = {part: None for part in ("text_encoder_3", "tokenizer_3") if "without_t5" in folder.name}
    loaded = diffusers.DiffusionPipeline.from_pretrained(folder, **absent)
    loaded.set_progress_bar_config(disable=True)
    return frozen(loaded)


def backbone_of(folder: Path, *, height: int = 16, width: int = 16, **settings: Any) -> Backbone:
    return load_backbone(
        ModelConfig(path=str(folder), max_sequence_length=TOKENS, height=height, width=width, **settings)
    )


def ours(backbone: Backbone, initial: torch.Tensor, guidance: float) -> list[torch.Tensor]:
    return ode_latents(backbone, initial, steps=STEPS, guidance=guidance, text=TEXT, negative=NEGATIVE)


def theirs(
    pipeline: Any, name: str, initial: torch.Tensor, guidance: float, height: int, width: int, **more: Any
) -> tuple[list[torch.Tensor], np.ndarray]:
    """The pipeline's latents after each step, unpacked, and its images in [0, 1]."""
    side = SIDES["flux" if name in FLUX else "sd35"]
    asked = {"guidance": guidance, "negative": NEGATIVE, "height": height, "width": width}
    return side.draw(pipeline, initial, [TEXT], steps=STEPS, output="np", **asked, **more)


@torch.no_grad()
def test_embeddings_equal_encode_prompt_bitwise(name: str, folder: Path, pipeline: Any) -> None:
    backbone = backbone_of(folder)
    for text in (TEXT, NEGATIVE, ""):
        found = backbone.encode(text).tensors
        if name in FLUX:
            embeds, pooled, _ = pipeline.encode_prompt(prompt=text, prompt_2=None, max_sequence_length=TOKENS)
        else:
            embeds, _, pooled, _ = pipeline.encode_prompt(
                prompt=text, prompt_2=None, prompt_3=None, max_sequence_length=TOKENS
            )
        assert torch.equal(found["encoder_hidden_states"], embeds)
        assert torch.equal(found["pooled_projections"], pooled)
        assert embeds.any() and pooled.any()


@pytest.mark.parametrize(
    ("guidance", "batch", "size"), pairwise(guidance=(1.0, 4.5), batch=(1, 5), size=((16, 16), (12, 8)))
)
def test_latents_after_every_step_and_images_equal_the_pipeline_s(
    name: str, folder: Path, pipeline: Any, guidance: float, batch: int, size: tuple[int, int]
) -> None:
    height, width = size
    backbone = backbone_of(folder, height=height, width=width)
    assert backbone.latent_shape == (4, height // 2, width // 2)
    initial = normal("initial", shape=(batch, *backbone.latent_shape))
    found = ours(backbone, initial, guidance)
    expected, images = theirs(pipeline, name, initial, guidance, height, width)
    assert len(expected) == STEPS
    is_exact = name not in FLUX or guidance == 1
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0 if is_exact else 1e-4, atol=0 if is_exact else 1e-4)
    drawn, levels = backbone.decode(found[-1]), images.astype(np.float64) * 255
    assert drawn.shape == (batch, height, width, 3)
    beside = 1e-3 if is_exact else 1  # a value between two levels, up to float32's rounding, may become either
    assert np.abs(drawn - levels).max() <= 0.5 + beside
    assert drawn.std() > 1


@pytest.mark.parametrize("name", ["flux_dev"], indirect=True)
def test_embedded_guidance_is_the_model_s_input(name: str, folder: Path, pipeline: Any) -> None:
    initial = normal("initial", shape=(2, 4, 8, 8))
    weak, strong = (ours(backbone_of(folder, embedded_guidance=value), initial, 1.0)[-1] for value in (1.5, 7.0))
    assert not torch.allclose(weak, strong)
    expected, _ = theirs(pipeline, name, initial, 1.0, 16, 16, guidance_scale=7.0)
    assert torch.equal(strong, expected[-1])


@pytest.mark.parametrize("steps", [1, 28])
def test_sigmas_are_the_pipeline_s(name: str, folder: Path, pipeline: Any, steps: int) -> None:
    height, width = 12, 8
    found = backbone_of(folder, height=height, width=width).sigmas(steps)
    pipeline(prompt=TEXT, num_inference_steps=steps, height=height, width=width, output_type="latent")
    assert torch.equal(found, pipeline.scheduler.sigmas)


def test_a_request_of_another_size_gives_the_images_of_a_model_of_that_size(name: str, folder: Path) -> None:
    asked = GenerateRequest(
        prompts=(Prompt(index=3, text=TEXT),) * 2,
        numbers=(0, 1),
        seed=7,
        steps=STEPS,
        adapter_version=0,
        adapter_digest="",
        size=(12, 8),
    )
    square, small = (
        FlowPolicy(backbone_of(folder, **sides), SamplingConfig(steps=STEPS), guidance=1.0)
        for sides in ({}, {"height": 12, "width": 8})
    )
    images = generate(square, asked)
    assert images.shape == (2, 12, 8, 3)
    np.testing.assert_array_equal(images, generate(small, replace(asked, size=None)))
    assert generate(square, replace(asked, size=None)).shape == (2, 16, 16, 3), "training keeps its size"
    sigmas, other = square.backbone.sigmas(STEPS), square.backbone.sized(12, 8).sigmas(STEPS)
    assert torch.equal(other, small.backbone.sigmas(STEPS))
    assert torch.equal(sigmas, other) == (name != "flux_dev"), "only FLUX.1-dev's shift depends on the size"
    with pytest.raises(ModelError, match="must be multiples of 4, got 18 and 16"):
        generate(square, replace(asked, size=(18, 16)))


def test_decoding_in_pieces_gives_the_same_images(folder: Path) -> None:
    latents = normal("latents", shape=(5, 4, 8, 8))
    whole, pieces = (backbone_of(folder, decode_batch=size).decode(latents) for size in (None, 2))
    assert pieces.shape == whole.shape
    assert np.abs(whole.astype(int) - pieces).max() <= 1


def test_a_size_that_the_latents_cannot_hold_is_a_model_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="must be multiples of 4, got 18 and 16"):
        backbone_of(folder, height=18)


@pytest.mark.parametrize("name", ["sd35"], indirect=True)
def test_a_size_beyond_the_model_s_positions_is_a_model_error(name: str, folder: Path) -> None:
    with pytest.raises(ModelError, match="at most 32 .*got 36 and 16"):
        backbone_of(folder, height=36)


def test_a_scheduler_with_other_sigmas_is_refused(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    copied = shutil.copytree(folder, tmp_path / "model")
    file = copied / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_karras_sigmas": True}))
    with pytest.raises(ModelError, match="use_karras_sigmas"):
        backbone_of(copied)
