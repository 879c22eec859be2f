"""diffusers' own pipeline is the oracle: embeddings, trajectories and images are equal bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
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
from tests.support.worlds.tiny_models import frozen

STEPS = 4
TOKENS_OF_T5 = 2
TEXTS = ("a red circle", "two blue squares")


@pytest.fixture(scope="module")
def pipeline(tiny_sd3: Path) -> StableDiffusion3Pipeline:
    diffusers_logging.disable_progress_bar()
    loaded = StableDiffusion3Pipeline.from_pretrained(tiny_sd3, text_encoder_3=None, tokenizer_3=None)
    loaded.set_progress_bar_config(disable=True)
    return frozen(loaded)


@pytest.fixture(scope="module")
def backbone(tiny_sd3: Path) -> Backbone:
    return load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=TOKENS_OF_T5))


def policy_of(backbone: Backbone, guidance: float) -> FlowPolicy:
    return FlowPolicy(backbone, SamplingConfig(steps=STEPS), guidance=guidance)


def run_pipeline(pipeline: StableDiffusion3Pipeline, text: str, latents: torch.Tensor, guidance: float) -> np.ndarray:
    """The pipeline's images in [0, 1]."""
    return pipeline(
        prompt=text,
        negative_prompt="",
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        num_images_per_prompt=len(latents),
        latents=latents,
        output_type="np",
        max_sequence_length=TOKENS_OF_T5,
    ).images


def test_the_embeddings_of_the_newest_prompts_are_kept_and_no_more(
    tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flow.models.embeddings.KEPT_PROMPTS", 2)
    fresh = load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=TOKENS_OF_T5))
    first = {text: fresh.encode(text) for text in ("a", "b")}
    assert fresh.encode("a") is first["a"]
    fresh.encode("c")
    assert fresh.encode("a") is first["a"]
    again = fresh.encode("b")
    assert again is not first["b"]
    assert all(torch.equal(again.tensors[name], first["b"].tensors[name]) for name in again.tensors)


def test_velocity_depends_on_state_time_and_text(backbone: Backbone) -> None:
    latents, other = normal("x", shape=(1, *backbone.latent_shape)), normal("y", shape=(1, *backbone.latent_shape))
    first, second = (backbone.encode(text) for text in TEXTS)
    sigma = torch.tensor([0.7])
    velocity = backbone.velocity(latents, sigma, first)
    assert velocity.abs().mean() > 0.01
    assert not torch.allclose(velocity, backbone.velocity(other, sigma, first))
    assert not torch.allclose(velocity, backbone.velocity(latents, sigma / 2, first))
    assert not torch.equal(velocity, backbone.velocity(latents, sigma, second))


@pytest.mark.parametrize(("guidance", "batch"), [(1.0, 1), (4.5, 5)])
def test_draw_equals_the_pipeline_s_images_bitwise(
    pipeline: StableDiffusion3Pipeline, backbone: Backbone, guidance: float, batch: int
) -> None:
    request = GenerateRequest(
        prompts=(Prompt(index=3, text=TEXTS[1]),) * batch,
        numbers=tuple(range(batch)),
        seed=11,
        steps=STEPS,
        adapter_version=0,
        adapter_digest="",
    )
    initial = torch.stack([normal("draw", 11, 3, number, shape=backbone.latent_shape) for number in range(batch)])
    images = run_pipeline(pipeline, TEXTS[1], initial, guidance)
    drawn = generate(policy_of(backbone, guidance), request)
    assert drawn.dtype == np.uint8
    assert drawn.shape == (batch, 16, 16, 3)
    assert np.array_equal(drawn, (images * 255).round().astype(np.uint8))
    assert drawn.std() > 1


def test_a_request_of_several_prompts_gives_each_its_own_text(backbone: Backbone) -> None:
    prompts = tuple(Prompt(index=index, text=text) for index, text in enumerate(TEXTS))
    policy = policy_of(backbone, 4.5)

    def drawn(*which: int) -> np.ndarray:
        return generate(
            policy,
            GenerateRequest(
                prompts=tuple(prompts[i] for i in which),
                numbers=(0,) * len(which),
                seed=1,
                steps=2,
                adapter_version=0,
                adapter_digest="",
            ),
        )

    together = drawn(0, 1).astype(int)
    assert np.abs(together[0] - drawn(0)[0]).max() <= 1
    assert np.abs(together[1] - drawn(1)[0]).max() <= 1


def test_guidance_one_costs_one_forward_and_guidance_composes_both_branches(backbone: Backbone) -> None:
    rows: list[int] = []
    hook = backbone.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    latents, sigma, scale = normal("x", shape=(3, *backbone.latent_shape)), torch.full((3,), 0.6), 4.5
    try:
        plain, guided = policy_of(backbone, 1.0), policy_of(backbone, scale)
        with torch.no_grad():
            toward = plain.velocity(latents, sigma, plain.conditioning(TEXTS[0], "no"))
            without = plain.velocity(latents, sigma, plain.conditioning("no", ""))
            composed = guided.velocity(latents, sigma, guided.conditioning(TEXTS[0], "no"))
    finally:
        hook.remove()
    assert rows == [3, 3, 6]
    rounding = 1e-5  # of one float32 forward in a batch of 6 against a batch of 3; guidance amplifies both branches'
    torch.testing.assert_close(
        composed, without + scale * (toward - without), rtol=0, atol=(scale + scale - 1) * rounding
    )
    assert not torch.allclose(composed, toward)


def test_repeat_gives_every_sample_the_same_row(backbone: Backbone) -> None:
    one = backbone.encode(TEXTS[0])
    many = one.repeat(3)
    assert len(many) == 3
    assert all(torch.equal(many.tensors[name][row], one.tensors[name][0]) for name in one.tensors for row in range(3))


def test_a_half_precision_folder_computes_in_float32(tiny_sd3: Path, tmp_path: Path) -> None:
    halved = StableDiffusion3Pipeline.from_pretrained(tiny_sd3, text_encoder_3=None, tokenizer_3=None)
    halved.to(torch.float16).save_pretrained(tmp_path / "half")
    half = load_backbone(ModelConfig(path=str(tmp_path / "half"), max_sequence_length=TOKENS_OF_T5))
    assert {parameter.dtype for parameter in half.transformer.parameters()} == {torch.float32}
    assert all(tensor.dtype == torch.float32 for tensor in half.encode(TEXTS[0]).tensors.values())
    velocity = half.velocity(normal("x", shape=(1, 4, 8, 8)), torch.tensor([0.7]), half.encode(TEXTS[0]))
    assert velocity.dtype == torch.float32
    assert not torch.equal(velocity, velocity.half().float()), "the sums are float32, not rounded halves"


def test_a_folder_without_weights_is_a_model_error(tiny_sd3: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text((tiny_sd3 / "model_index.json").read_text())
    with pytest.raises(ModelError, match="got none for .*'transformer', 'vae'"):
        load_backbone(ModelConfig(path=str(tmp_path)))
    for part in tiny_sd3.iterdir():
        if part.is_dir():
            (tmp_path / part.name).mkdir()
    with pytest.raises(ModelError, match="transformer.config.json cannot be read"):
        load_backbone(ModelConfig(path=str(tmp_path)))
