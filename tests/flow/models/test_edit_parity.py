"""Every family that edits against its own pipeline: latents of condition images, sizes, latents of all steps, images.

float32 without guidance bit for bit; otherwise as in `test_qwen_parity` and `test_half_parity`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from flow.adapter.lora import Lora
from flow.adapter.lora_file import write_lora
from flow.maths.noise import normal
from flow.models.contract import Backbone
from flow.models.load import load_backbone
from flow.models.located import Sizes, adapter_config
from flow.policy import FlowPolicy, build_policy
from flow.rollout import generate, rollout_shard
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.config.sampling import SamplingConfig
from protocol.ground.condition_images import condition_of
from protocol.messages import ConditionImage, GenerateRequest, Prompt, ShardRequest
from tests.support.learning.groups import far_from_fresh, log_probs_of
from tests.support.worlds.drawn import ode_latents
from tests.support.worlds.pipelines import EDITING
from tests.support.worlds.tensors import difference

STEPS, BOUND = 2, 0.02
TEXT, NEGATIVE = "make it red", "blurry"
SEVERAL = "qwen_image_edit_plus", "flux2_klein"
"""The families whose prompts may have several images."""


@pytest.fixture(scope="module", params=EDITING)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return EDITING[name].write(tmp_path_factory.mktemp("models") / name)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pipelines, and so ours, resize condition images to a small part of their sides."""
    sizes = [(w // 64, h // 64) for w, h in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    monkeypatch.setattr(Flux2ImageProcessor, "check_image_input", lambda *_: None)  # it wants sides of 64 pixels
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        whole = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, of=whole: of(max(area // 256, 4096), ratio)
        )


def image_file(folder: Path, width: int, height: int) -> ConditionImage:
    """An image of smooth noise, which a wrong way of resizing would change."""
    path = folder / f"{width}x{height}.png"
    few = np.random.default_rng(width).integers(0, 256, (5, 7, 3), np.uint8)
    Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return condition_of(path)


def images(conditions: Sequence[ConditionImage]) -> Any:
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
    backbone = backbone_of(folder, height=height, width=width)
    conditions = tuple(image_file(tmp_path, *each) for each in (sides, (33, 20))[: 1 + (name in SEVERAL)])
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
    other = drawn(conditions=(image_file(tmp_path, 33, 24), *conditions[1:]))
    assert not torch.allclose(found[-1], other[-1], atol=1e-2), "the condition acts"


@pytest.mark.parametrize(("dtype", "guidance"), [("bfloat16", 1.0), ("float16", 2.5)])
def test_the_last_latents_are_those_of_the_pipeline_in_the_same_dtype(
    name: str, folder: Path, tmp_path: Path, small: None, device: str, dtype: str, guidance: float
) -> None:
    side, conditions = EDITING[name], (image_file(tmp_path, 40, 24),)
    pipeline = side.load(folder, getattr(torch, dtype)).to(device)
    backbone = backbone_of(folder, dtype=dtype, height=16, width=12, device=device)
    initial = normal("initial", shape=(1, *backbone.latent_shape)).to(device)
    asked: dict[str, Any] = {"steps": 4, "guidance": guidance, "negative": NEGATIVE}
    found = ode_latents(backbone, initial, **asked, text=TEXT, conditions=conditions)[-1]
    more = {"height": 16, "width": 12, "image": images(conditions)}
    assert difference(found, side.draw(pipeline, initial, [TEXT], **asked, **more)[0][-1]) <= BOUND


class SizesSeenError(Exception):
    """Ends a pipeline that has resized its images."""


def test_an_image_is_resized_as_by_the_pipeline(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the pipelines' own sizes of some megapixel, with the VAE's real scale."""
    backbone: Any = backbone_of(folder)
    pipeline, sizes = EDITING[name].load(folder), Sizes(scale=8, token=16, most=None)
    pipeline.vae_scale_factor = sizes.scale
    pipeline.image_processor.register_to_config(vae_scale_factor=sizes.token)
    made: list[torch.Tensor] = []
    read: list[tuple[int, int]] = []
    preprocess = pipeline.image_processor.preprocess

    def resized(*given: Any, **options: Any) -> torch.Tensor:
        made.append(preprocess(*given, **options))
        return made[-1]

    def encoded(image: Any = None, **_: Any) -> tuple[torch.Tensor, None, None]:
        read.extend(each.size for each in ([] if image is None else image if isinstance(image, list) else [image]))
        return (torch.zeros(1, 1, 1), None, None)[: 3 if name == "flux_kontext" else 2]

    def enough(*_: Any, **__: Any) -> None:
        raise SizesSeenError

    monkeypatch.setattr(pipeline, "encode_prompt", encoded)
    monkeypatch.setattr(pipeline, "prepare_latents", enough)
    for sides in ((300, 170), (64, 512), (1000, 1000), (2017, 1513)):
        image = images([image_file(tmp_path, *sides)])
        size = backbone.condition_size(*sides, side=1024, sizes=sizes)
        ours = backbone.prepared(pipeline, image, size, sizes)
        monkeypatch.setattr(pipeline.image_processor, "preprocess", resized)
        with pytest.raises(SizesSeenError):
            pipeline(prompt=TEXT, image=image, height=1024, width=1024)
        monkeypatch.setattr(pipeline.image_processor, "preprocess", preprocess)
        assert torch.equal(ours, made[-1])
        assert read[-1:] == ([backbone.read_size(*sides, 1024)] if "qwen" in name else [])


def test_prompts_whose_images_differ_in_size_are_made_in_one_request_as_alone(
    name: str, folder: Path, tmp_path: Path, small: None
) -> None:
    policy = FlowPolicy(backbone_of(folder), SamplingConfig(steps=STEPS), guidance=1.0)
    wide, square = image_file(tmp_path, 60, 24), image_file(tmp_path, 32, 32)
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


def test_a_plain_pipeline_with_the_saved_lora_makes_the_same_image(
    name: str, folder: Path, tmp_path: Path, small: None
) -> None:
    side, conditions = EDITING[name], (image_file(tmp_path, 24, 32),)
    backbone = backbone_of(folder)
    initial = normal("initial", shape=(1, *backbone.latent_shape))
    drawn = partial(ode_latents, backbone, initial, steps=STEPS, guidance=1.0, text=TEXT, negative=NEGATIVE)
    before = drawn(conditions=conditions)[-1]
    config = adapter_config(ModelConfig(path=str(folder), lora=LoraConfig(rank=4, alpha=12)))
    lora = Lora(backbone.transformer, config, seed=1)
    adapter = far_from_fresh(lora.export(version=0))
    lora.load(adapter)
    write_lora(tmp_path, adapter, config)
    pipeline = side.load(folder)
    pipeline.load_lora_weights(tmp_path)
    more = {"height": 16, "width": 16, "image": images(conditions)}
    expected, _ = side.draw(pipeline, initial, [TEXT], steps=STEPS, guidance=1.0, negative=NEGATIVE, **more)
    found = drawn(conditions=conditions)[-1]
    assert (found - expected[-1]).norm() < 1e-5 * found.norm(), "peft does not merge"
    assert not torch.allclose(found, before, atol=1e-2)


@pytest.mark.parametrize(("dtype", "guidance"), [("float32", 2.5), ("bfloat16", 1.0)])
def test_log_probs_are_replayed_bit_for_bit(
    name: str,
    folder: Path,
    tmp_path: Path,
    small: None,
    tiny_config: Callable[..., RunConfig],
    device: str,
    dtype: str,
    guidance: float,
) -> None:
    sizes = {"height": 16, "width": 12, "max_sequence_length": EDITING[name].tokens}
    model = {"path": str(folder), "dtype": dtype, "guidance": guidance, "lora": {"targets": ["attn.to_q"]}, **sizes}
    config = tiny_config(model=model)
    (ours, lora), (theirs, other) = (build_policy(config, device=device) for _ in range(2))
    adapter = far_from_fresh(lora.export(version=0))
    for each in (lora, other):
        each.load(adapter)
    prompt = Prompt(index=1, text=TEXT, negative=NEGATIVE, conditions=(image_file(tmp_path, 30, 40),))
    request = ShardRequest(
        iteration=1, group=1, prompt=prompt, first_member=2, members=2, adapter_version=0, adapter_digest=""
    )
    rollout, _ = rollout_shard(theirs, request, config)
    assert rollout.log_probs is not None
    assert np.array_equal(log_probs_of(ours, rollout).numpy(), rollout.log_probs)
