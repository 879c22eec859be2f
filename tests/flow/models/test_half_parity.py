"""Every family in half precision against its own pipeline in the same dtype: the latents after the last step.

Tiny models with random weights and few steps. Without guidance and with one prompt both sides compute the same
velocities, and differ because ours keeps the latents in float32 between two steps, as only Z-Image's pipeline does.
With guidance or several prompts the batches differ, too, which some kernels round otherwise; then twice the pipeline's
own difference between batches of 1 and 2 is allowed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from flow.maths.noise import normal
from flow.models.load import load_backbone
from protocol.config.model import ModelConfig
from tests.support.worlds.drawn import ode_latents
from tests.support.worlds.pipelines import SIDES
from tests.support.worlds.tensors import difference

STEPS, BOUND = 4, 0.02
TEXT, OTHER, NEGATIVE = "a red circle", "two blue squares and", "blurry"
CASES = [
    ("bfloat16", (16, 16), 1.0, [TEXT]),
    ("float16", (12, 8), 1.0, [TEXT]),
    ("float16", (16, 16), 2.5, [TEXT]),
    ("bfloat16", (8, 16), 2.5, [TEXT, OTHER]),
]
"""Dtype, size in pixels, guidance and prompts. In the first case, a time rounded only once is another one in FLUX.1,
FLUX.2-klein and Qwen-Image."""


@pytest.fixture(scope="module", params=SIDES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SIDES[name].write(tmp_path_factory.mktemp("models") / name)


@pytest.mark.parametrize(("dtype", "size", "guidance", "prompts"), CASES)
def test_the_last_latents_are_those_of_the_pipeline_in_the_same_dtype(
    name: str, folder: Path, device: str, dtype: str, size: tuple[int, int], guidance: float, prompts: list[str]
) -> None:
    side, (height, width) = SIDES[name], size
    pipeline = side.load(folder, getattr(torch, dtype)).to(device)
    sides: dict[str, Any] = {"height": height, "width": width}
    model = ModelConfig(path=str(folder), max_sequence_length=side.tokens, dtype=dtype, **sides)
    backbone = load_backbone(model, device=device)
    initial = normal("initial", shape=(2, *backbone.latent_shape)).to(device)

    def theirs(rows: torch.Tensor, texts: list[str]) -> torch.Tensor:
        return side.draw(pipeline, rows, texts, steps=STEPS, guidance=guidance, negative=NEGATIVE, **sides)[0][-1]

    found = ode_latents(backbone, initial, steps=STEPS, guidance=guidance, text=prompts, negative=NEGATIVE)[-1]
    expected = theirs(initial, prompts)
    allowed = BOUND
    if guidance > 1 or len(prompts) > 1:
        allowed = max(BOUND, 2 * difference(expected[:1], theirs(initial[:1], prompts[:1])))
    assert difference(found, expected) <= allowed
    assert difference(found, initial) > 0.2, "the steps lead somewhere"
