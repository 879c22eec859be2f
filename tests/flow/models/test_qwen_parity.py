"""FLUX.2-klein, both Qwen-Image and Z-Image against their own pipelines: embeddings, sigmas, latents, guidance, images.

float32. Without guidance bit for bit; with guidance two pipelines run the branches apart and ours as one batch, where
the shorter prompt is padded, so they differ by rounding.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flow.maths.noise import normal
from flow.models.contract import EMBEDS, Backbone, stack
from flow.models.load import load_backbone, require_loadable
from flow.models.located import locate
from protocol.config.model import ModelConfig
from protocol.errors import ModelError
from tests.support.worlds.drawn import ode_latents
from tests.support.worlds.pipelines import SIDES, klein_embeddings

STEPS = 2
TEXT, NEGATIVE = "a red circle and a blue square", "blurry"
EMBEDDINGS: dict[str, Callable[[Any, str, int], torch.Tensor]] = {
    "flux2_klein": klein_embeddings,
    "qwen_image": lambda pipeline, text, tokens: pipeline.encode_prompt(prompt=text, max_sequence_length=tokens)[0],
    "qwen_image_21": lambda pipeline, text, tokens: pipeline.encode_prompt(prompt=text)[0][:, :tokens],
    "z_image": lambda pipeline, text, tokens: pipeline.encode_prompt(prompt=text, max_sequence_length=tokens)[0][0][
        None
    ],
}
"""The pipelines' own embeddings of a prompt."""


@pytest.fixture(scope="module", params=EMBEDDINGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SIDES[name].write(tmp_path_factory.mktemp("models") / name)


@pytest.fixture(scope="module")
def pipeline(name: str, folder: Path) -> Any:
    return SIDES[name].load(folder)


@cache
def backbone_of(folder: Path, *, height: int = 16, width: int = 16) -> Backbone:
    return load_backbone(
        ModelConfig(path=str(folder), max_sequence_length=SIDES[folder.name].tokens, height=height, width=width)
    )


def ours(backbone: Backbone, initial: torch.Tensor, guidance: float) -> list[torch.Tensor]:
    return ode_latents(backbone, initial, steps=STEPS, guidance=guidance, text=TEXT, negative=NEGATIVE)


@torch.no_grad()
def test_embeddings_equal_encode_prompt_bitwise_and_know_their_length(name: str, folder: Path, pipeline: Any) -> None:
    backbone, most = backbone_of(folder), SIDES[name].tokens
    for text in (TEXT, NEGATIVE, "", "long " * most):
        found, expected = backbone.encode(text), EMBEDDINGS[name](pipeline, text, most)
        assert torch.equal(found.tensors[EMBEDS], expected)
        assert found.lengths == (expected.shape[1],)
        assert expected.any()


@pytest.mark.parametrize(
    ("height", "width", "batch", "guidance"), [(16, 16, 1, 1.0), (12, 8, 3, 1.0), (16, 16, 2, 4.5), (12, 8, 1, 4.5)]
)
def test_latents_after_every_step_and_images_equal_the_pipeline_s(
    name: str, folder: Path, pipeline: Any, guidance: float, batch: int, height: int, width: int
) -> None:
    side, backbone = SIDES[name], backbone_of(folder, height=height, width=width)
    channels, rows, columns = side.shape
    rows, columns = rows * height // 16, columns * width // 16
    assert backbone.latent_shape == (channels, rows, columns)
    initial = normal("initial", shape=(batch, *backbone.latent_shape))
    expected, images = side.draw(
        pipeline,
        initial,
        [TEXT],
        steps=STEPS,
        guidance=guidance,
        negative=NEGATIVE,
        height=height,
        width=width,
        output="np",
    )
    found = ours(backbone, initial, guidance)
    assert len(expected) == STEPS
    most = 0 if guidance == 1 else 2e-3  # Z-Image differs most, by 5e-4 on a CPU without AVX
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=most, atol=most)
    drawn, levels = (
        backbone.decode(found[-1]),
        images[..., :3].astype(np.float64) * 255,
    )  # without Qwen-Image-2.1's alpha
    assert drawn.shape == (batch, height, width, 3)
    beside = 1e-3 if guidance == 1 else 1  # a value between two levels, up to float32's rounding, may become either
    assert np.abs(drawn - levels).max() <= 0.5 + beside
    assert drawn.std() > 1
    assert not torch.allclose(found[-1], ours(backbone, initial, 5.5 - guidance)[-1], atol=1e-2), "guidance acts"


@pytest.mark.parametrize("steps", [2, 10, 28])
def test_sigmas_are_the_pipeline_s(name: str, folder: Path, pipeline: Any, steps: int) -> None:
    height, width = 12, 8
    found = backbone_of(folder, height=height, width=width).sigmas(steps)
    assert torch.equal(backbone_of(folder).sized(height, width).sigmas(steps), found)
    assert (
        backbone_of(folder).sized(height, width).latent_shape
        == backbone_of(folder, height=height, width=width).latent_shape
    )

    def enough(*_: Any) -> None:
        raise StopIteration

    with pytest.raises(StopIteration):
        pipeline(
            prompt="",
            num_inference_steps=steps,
            callback_on_step_end=enough,
            **SIDES[name].options(height, width, 40),
        )
    assert torch.equal(found, pipeline.scheduler.sigmas)


@torch.no_grad()
def test_a_prompt_s_velocity_does_not_depend_on_the_prompts_beside_it(name: str, folder: Path) -> None:
    backbone = backbone_of(folder)
    short, long = backbone.encode(NEGATIVE), backbone.encode(TEXT)
    latents, sigma = normal("x", shape=(2, *backbone.latent_shape)), torch.full((2,), 0.6)
    both = backbone.velocity(latents, sigma, stack([short, long]))
    for row, alone in enumerate((short, long)):
        each = backbone.velocity(latents[row : row + 1], sigma[:1], alone)
        torch.testing.assert_close(both[row : row + 1], each, rtol=1e-3, atol=1e-3)


def test_a_size_that_the_latents_cannot_hold_is_a_model_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="must be multiples of 4, got 18 and 16"):
        backbone_of(folder, height=18)


@pytest.mark.parametrize("name", ["qwen_image", "qwen_image_21"], indirect=True)
def test_a_schedule_with_a_fixed_end_needs_two_steps(name: str, folder: Path) -> None:
    with pytest.raises(ModelError, match="at least 2 steps"):
        backbone_of(folder).sigmas(1)


@pytest.mark.parametrize("name", ["qwen_image_21"], indirect=True)
def test_a_model_that_is_distilled_to_its_own_sigmas_is_refused(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "turbo")
    index = model / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"sample_sigmas": [1.0, 0.5]}))
    for read in (lambda config: require_loadable(locate(config)), load_backbone):
        with pytest.raises(ModelError, match="must leave sample_sigmas off"):
            read(ModelConfig(path=str(model)))


@pytest.mark.parametrize("name", ["qwen_image"], indirect=True)
def test_guidance_of_qwen_image_keeps_the_norm_of_every_token(name: str, folder: Path) -> None:
    """One block (3, 4, 0 ...) of norm 5 without, (0, 0, 12, 5) of norm 13 toward: the guided one has norm 13."""
    backbone = backbone_of(folder)
    without, toward = torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)
    without[0, 0, 0] = torch.tensor([3.0, 4.0])
    toward[0, 0, 1] = torch.tensor([12.0, 5.0])
    found = backbone.guide(without, toward, 3.0)
    assert found.norm().item() == pytest.approx(13)
    wanted = without + 3 * (toward - without)
    torch.testing.assert_close(found, wanted * 13 / wanted.norm())
