"""Every family that edits against its own pipeline: latents of condition images, sizes, latents of all steps, images.

float32 without guidance bit for bit; otherwise as in `test_qwen_parity` and `test_half_parity`.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image

from flow.maths.noise import normal
from flow.models.contract import Backbone
from flow.models.load import load_backbone
from flow.policy import FlowPolicy
from flow.rollout import generate
from protocol.config.model import ModelConfig
from protocol.config.sampling import SamplingConfig
from protocol.ground.pictures import condition_of
from protocol.messages import Condition, GenerateRequest, Prompt
from tests.flow.models.test_half_parity import BOUND, difference
from tests.support.worlds.drawn import ode_latents
from tests.support.worlds.pipelines import EDITING
from tests.support.worlds.tiny_models import write_kontext

STEPS = 2
TEXT, NEGATIVE = "make it red", "blurry"


@pytest.fixture(scope="module", params=EDITING)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return EDITING[name].write(tmp_path_factory.mktemp("models") / name)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pipelines, and so ours, resize condition images to a 64th of their sides."""
    sizes = [(w // 64, h // 64) for w, h in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)


def picture(folder: Path, width: int, height: int) -> Condition:
    """A picture of smooth noise, which a wrong way of resizing would change."""
    path = folder / f"{width}x{height}.png"
    few = np.random.default_rng(width).integers(0, 256, (5, 7, 3), np.uint8)
    Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return condition_of(path)


def images(conditions: Sequence[Condition]) -> Any:
    found = [Image.open(each.path) for each in conditions]
    return found[0] if len(found) == 1 else found


def backbone_of(folder: Path, *, device: str = "cpu", **settings: Any) -> Backbone:
    sizes = {"height": 16, "width": 16, "max_sequence_length": EDITING[folder.name].tokens}
    return load_backbone(ModelConfig(path=str(folder), **{**sizes, **settings}), device=device)


@pytest.mark.parametrize(
    ("size", "guidance", "sides"),
    [((16, 16), 1.0, (24, 24)), ((12, 8), 1.0, (90, 41)), ((16, 16), 4.5, (24, 24)), ((16, 16), 1.0, (30, 70))],
    ids=str,
)
def test_latents_after_every_step_and_images_equal_the_pipeline_s(
    name: str, folder: Path, tmp_path: Path, small: None, size: tuple[int, int], guidance: float, sides: tuple[int, int]
) -> None:
    side, (height, width) = EDITING[name], size
    backbone, conditions = backbone_of(folder, height=height, width=width), (picture(tmp_path, *sides),)
    initial = normal("initial", shape=(1, *backbone.latent_shape))
    drawn = partial(ode_latents, backbone, initial, steps=STEPS, guidance=guidance, text=TEXT, negative=NEGATIVE)
    found = drawn(conditions=conditions)
    asked = {"guidance": guidance, "negative": NEGATIVE, "height": height, "width": width, "output": "np"}
    expected, made = side.draw(side.load(folder), initial, [TEXT], steps=STEPS, **asked, image=images(conditions))
    assert len(expected) == STEPS
    most = 0 if guidance == 1 else 2e-3
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=most, atol=most)
    levels = made.astype(np.float64) * 255
    assert np.abs(backbone.decode(found[-1]) - levels).max() <= 0.5 + (1e-3 if guidance == 1 else 1)
    other = drawn(conditions=(picture(tmp_path, *reversed([*sides[:1], 33])),))
    assert not torch.allclose(found[-1], other[-1], atol=1e-2), "the condition acts"


@pytest.mark.parametrize(("dtype", "guidance"), [("bfloat16", 1.0), ("float16", 2.5)])
def test_the_last_latents_are_those_of_the_pipeline_in_the_same_dtype(
    name: str, folder: Path, tmp_path: Path, small: None, device: str, dtype: str, guidance: float
) -> None:
    side, conditions = EDITING[name], (picture(tmp_path, 40, 24),)
    pipeline = side.load(folder, getattr(torch, dtype)).to(device)
    backbone = backbone_of(folder, dtype=dtype, height=16, width=12, device=device)
    initial = normal("initial", shape=(1, *backbone.latent_shape)).to(device)
    asked: dict[str, Any] = {"steps": 4, "guidance": guidance, "negative": NEGATIVE}
    found = ode_latents(backbone, initial, **asked, text=TEXT, conditions=conditions)[-1]
    more = {"height": 16, "width": 12, "image": images(conditions)}
    assert difference(found, side.draw(pipeline, initial, [TEXT], **asked, **more)[0][-1]) <= BOUND


def test_a_picture_is_resized_as_by_the_pipeline(name: str, tmp_path: Path) -> None:
    """At the pipelines' own sizes of some megapixel, with a VAE that halves three times as the real ones do."""
    writer = {"flux_kontext": write_kontext}[name]
    side, conditions = EDITING[name], (picture(tmp_path, 300, 170),)
    folder = writer(tmp_path / name, levels=4)
    backbone = backbone_of(folder, height=32, width=48)
    initial = normal("initial", shape=(1, *backbone.latent_shape))
    asked: dict[str, Any] = {"steps": STEPS, "guidance": 1.0, "negative": NEGATIVE}
    found = ode_latents(backbone, initial, **asked, text=TEXT, conditions=conditions)
    more = {"height": 32, "width": 48, "image": images(conditions)}
    expected, _ = side.draw(side.load(folder), initial, [TEXT], **asked, **more)
    assert torch.equal(found[-1], expected[-1])


def test_prompts_whose_images_differ_in_size_are_made_in_one_request_as_alone(
    name: str, folder: Path, tmp_path: Path, small: None
) -> None:
    policy = FlowPolicy(backbone_of(folder), SamplingConfig(steps=STEPS), guidance=1.0)
    wide, square = picture(tmp_path, 60, 24), picture(tmp_path, 32, 32)
    prompts = [Prompt(index=index, text=TEXT, conditions=(each,)) for index, each in enumerate((wide, square, wide))]

    def made(*asked: Prompt) -> np.ndarray:
        return generate(
            policy,
            GenerateRequest(
                prompts=asked,
                numbers=(0,) * len(asked),
                seed=7,
                steps=STEPS,
                adapter_version=0,
                adapter_digest="",
            ),
        )

    together = made(*prompts)
    np.testing.assert_array_equal(together[1], made(prompts[1])[0])
    np.testing.assert_array_equal(together[::2], made(prompts[0], prompts[2]))
    assert (together[0] != together[2]).any()
