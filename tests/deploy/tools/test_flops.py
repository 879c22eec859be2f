"""The counted operations of a forward against a formula from the numbers of each family's config."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from deploy.tools.estimate import pass_cost
from flow.models.hollow import attach_hollow_adapter, hollow_backbone
from flow.models.hub import KNOWN
from flow.models.located import adapter_config
from protocol.config.model import ModelConfig

LAYERS, RANK = 2, 32
"""Layers of each kind, so that a model is made in a second, and the adapter's rank."""


def product(tokens: int, inner: int, outer: int) -> int:
    return 2 * tokens * inner * outer


def attention(tokens: int, width: int) -> int:
    """Scores and their weighted sum: two products of all heads together."""
    return 2 * 2 * tokens * tokens * width


def lora(tokens: int, inner: int, outer: int) -> int:
    return 2 * tokens * RANK * (inner + outer)


def sd3(image: int, text: int, config: dict[str, Any]) -> int:
    """24 joint blocks; dual ones attend once more within the image. The last block drops its text."""
    d = config["num_attention_heads"] * config["attention_head_dim"]
    total = product(image, 16 * 4, d) + product(text, config["joint_attention_dim"], d) + product(image, d, 16 * 4)
    for block in range(LAYERS):
        is_last, is_dual = block == LAYERS - 1, block in config["dual_attention_layers"]
        both = image + (0 if is_last else text)
        total += 3 * product(image + text, d, d) + product(both, d, d) + attention(image + text, d)
        total += 3 * lora(image + text, d, d) + lora(both, d, d)
        total += 2 * product(both, d, 4 * d)
        if is_dual:
            total += 4 * product(image, d, d) + attention(image, d)
        total += product(1, d, (9 if is_dual else 6) * d) + product(1, d, (2 if is_last else 6) * d)
    return total


def flux(image: int, text: int, config: dict[str, Any]) -> int:
    """Double blocks keep image and text apart but for the attention; single blocks have one stream."""
    d = config["num_attention_heads"] * config["attention_head_dim"]
    tokens = image + text
    total = product(text, config["joint_attention_dim"], d) + 2 * product(image, 64, d)
    double = 4 * product(tokens, d, d) + attention(tokens, d) + 2 * product(tokens, d, 4 * d) + 2 * product(1, d, 6 * d)
    double += 4 * lora(tokens, d, d) + 2 * lora(tokens, d, 4 * d)
    single = 3 * product(tokens, d, d) + attention(tokens, d) + product(tokens, d, 4 * d) + product(tokens, 5 * d, d)
    single += product(1, d, 3 * d) + 3 * lora(tokens, d, d) + lora(tokens, d, 4 * d) + lora(tokens, 5 * d, d)
    return total + LAYERS * (double + single)


def flux2(image: int, text: int, config: dict[str, Any]) -> int:
    """As FLUX.1 with gated feed-forwards (three products of width 3 d), and single blocks with two joined products."""
    d, r = config["num_attention_heads"] * config["attention_head_dim"], round(config["mlp_ratio"])
    tokens = image + text
    total = product(text, config["joint_attention_dim"], d) + 2 * product(image, 128, d)
    double = 4 * product(tokens, d, d) + attention(tokens, d) + 3 * product(tokens, d, r * d)
    double += 4 * lora(tokens, d, d) + lora(tokens, d, 2 * r * d) + lora(tokens, r * d, d)
    joined = 3 * d + 2 * r * d
    single = product(tokens, d, joined) + product(tokens, d + r * d, d) + attention(tokens, d)
    single += lora(tokens, d, joined) + lora(tokens, d + r * d, d)
    return total + LAYERS * (double + single) + product(1, d, (6 + 6 + 3) * d)


def qwen(image: int, text: int, config: dict[str, Any]) -> int:
    """60 double blocks as FLUX.1's."""
    d = config["num_attention_heads"] * config["attention_head_dim"]
    tokens = image + text
    total = product(text, config["joint_attention_dim"], d) + 2 * product(image, 64, d)
    block = 4 * product(tokens, d, d) + attention(tokens, d) + 2 * product(tokens, d, 4 * d) + 2 * product(1, d, 6 * d)
    return total + LAYERS * (block + 4 * lora(tokens, d, d) + 2 * lora(tokens, d, 4 * d))


def qwen_21(image: int, text: int, config: dict[str, Any]) -> int:
    """Single-stream blocks with gated feed-forwards of width 3 d; the prompt attends only to itself."""
    d, tokens = config["num_attention_heads"] * config["attention_head_dim"], image + text
    inner = config["mlp_ratio"] * d
    total = product(text, config["context_in_dim"], d) + product(text, d, d) + product(image, 64, d)
    block = 4 * product(tokens, d, d) + 3 * product(tokens, d, inner) + 4 * lora(tokens, d, d)
    block += 3 * lora(tokens, d, inner) + 2 * 2 * (image * tokens + text * text) * d
    return total + LAYERS * block + product(tokens, d, 64)


def z_image(image: int, text: int, config: dict[str, Any]) -> int:
    """Blocks over both streams, after refiners of each stream alone; gated feed-forwards of width 8/3 d."""
    d = config["dim"]
    inner = int(d / 3 * 8)
    image, text = -(-image // 32) * 32, -(-text // 32) * 32

    def block(tokens: int, *, is_modulated: bool) -> int:
        own = 4 * product(tokens, d, d) + attention(tokens, d) + 3 * product(tokens, d, inner)
        own += 4 * lora(tokens, d, d) + 3 * lora(tokens, d, inner)
        return own + is_modulated * product(1, 256, 4 * d)

    refined = block(image, is_modulated=True) + block(text, is_modulated=False)
    total = product(text, config["cap_feat_dim"], d) + 2 * product(image, 64, d)
    return total + config["n_refiner_layers"] * refined + LAYERS * block(image + text, is_modulated=True)


FAMILIES: dict[str, tuple[Callable[[int, int, dict[str, Any]], int], int]] = {
    "stabilityai/stable-diffusion-3.5-medium": (sd3, 77 + 128),
    "black-forest-labs/FLUX.1-dev": (flux, 128),
    "black-forest-labs/FLUX.2-klein-base-4B": (flux2, 128),
    "Qwen/Qwen-Image": (qwen, 128),
    "Qwen/Qwen-Image-2.1": (qwen_21, 128),
    "Tongyi-MAI/Z-Image": (z_image, 128),
}


@pytest.mark.parametrize(("path", "pixels"), zip(FAMILIES, cycle((512, 768, 1024)), strict=False))
def test_operations_of_a_forward_are_those_of_the_formula(path: str, pixels: int) -> None:
    formula, text = FAMILIES[path]
    model = ModelConfig(
        path=str(KNOWN / path),
        dtype="bfloat16",
        height=pixels,
        width=pixels,
        max_sequence_length=128,
        lora={"rank": RANK, "alpha": 2 * RANK},
    )
    fake = FakeTensorMode()
    backbone = hollow_backbone(model, within=fake, most_layers=LAYERS)
    attach_hollow_adapter(backbone.transformer, adapter_config(model), within=fake)
    with fake:
        forward = pass_cost(backbone, 1, has_gradient=False)
    assert forward.flops == pytest.approx(
        formula((pixels // 16) ** 2, text, dict(backbone.transformer.config)), rel=0.02
    )
