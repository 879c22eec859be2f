"""SD3.5-Medium with random weights: the benchmark, forwards alone, the VAE, and a LoRA's gradient in half precision."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.gpu import Setup, config_of, measure, pairs_of
from benchmarks.speed.gpu_model import random_backbone, random_lora
from benchmarks.speed.slot.part import Figures, Where, tried
from benchmarks.speed.slot.timing import milliseconds_by_kind, seconds_of
from deploy.tools.estimate import pass_of
from flow.compiled import compile_decoder
from flow.policy import policy_of
from protocol.config.parse import parse_config

PAIRS = 4608
"""Pairs of an optimizer step of `sd35_geneval`, by which its loss is divided."""
SCALES = 2.0**16, 2.0**21
"""Loss scales of float16."""


def benchmark(where: Where, **options: Any) -> Iterator[Figures]:
    """Run `benchmarks.speed.gpu` with 16 pairs at a time and T' = 2."""
    setup = Setup(device=where.device, learner_batch=16, substeps=(2,), rounds=2, **options)
    yield from measure(replace(setup, is_tiny=True, members=2, rounds=1) if where.is_tiny else setup)


def compiled(where: Where) -> Iterator[Figures]:
    """Run the same with compiled blocks."""
    yield from benchmark(where, compile="inductor")


def tuned(where: Where) -> Iterator[Figures]:
    """Run the same with all kernels that are off by default."""
    yield from benchmark(where, is_tuned=True)


def forwards(where: Where) -> Iterator[Figures]:
    """Measure forwards without a gradient by their rows, and the VAE by its layout and compiler."""
    config = config_of(Setup(device=where.device, is_tiny=where.is_tiny))
    backbone = random_backbone(config.model, is_tiny=where.is_tiny, device=where.device)
    random_lora(backbone.transformer, config.model)
    for rows in (1, 2) if where.is_tiny else (16, 24, 48):
        work = pass_of(backbone, rows, has_gradient=False, device=where.device)
        yield {f"{rows} rows, ms": 1e3 * seconds_of(work, rounds=3)}
        kinds = milliseconds_by_kind(work, device=where.device)
        yield {f"{rows} rows, ms of {kind}": spent for kind, spent in kinds.items()}
    images = 2 if where.is_tiny else 8
    latents = torch.randn(images, *backbone.latent_shape, device=where.device)
    decode = torch.no_grad()(backbone.pixels)

    def decoded() -> Figures:
        began = time.perf_counter()
        decode(latents)
        first = time.perf_counter() - began
        seconds = seconds_of(lambda: decode(latents), rounds=3)
        kinds = milliseconds_by_kind(lambda: decode(latents), device=where.device)
        spent = {f"ms of {kind}": found for kind, found in kinds.items()}
        return {"first s": first, "ms an image": 1e3 * seconds / images, **spent}

    yield tried("VAE", decoded)
    backbone.vae.to(memory_format=torch.channels_last)
    yield tried("VAE, channels last", decoded)
    if where.device == "cuda":  # a CPU has no use for it, and would compile for long
        compile_decoder(backbone.vae.decoder, "inductor", device=where.device)
        yield tried("VAE, channels last, as with model.vae_compile", decoded)
    backbone.vae.to(memory_format=torch.contiguous_format).decoder.compile(dynamic=False)
    yield tried("VAE, compiled", decoded)


def gradients(where: Where) -> Iterator[Figures]:
    """Compare the gradient of a LoRA with that of float32 and equally rounded weights, by precision and loss scale."""
    for dtype, scales in (("bfloat16", (1.0,)), ("float16", SCALES)):
        exact = _gradient(where, dtype, [1.0], is_exact=True)[0]
        for scale, found in zip(scales, _gradient(where, dtype, scales), strict=True):
            name = dtype if scale == 1 else f"{dtype}, scale 2^{scale.hex().partition('p+')[2]}"
            for part in ("lora_A", "lora_B"):
                yield tried(f"{name}, {part}", partial(_compared, exact, found, part))


def _gradient(
    where: Where, dtype: str, scales: list[float] | tuple[float, ...], *, is_exact: bool = False
) -> list[dict[str, Tensor]]:
    """Return the gradients of `learner.update` for four pairs with guidance, undone by the loss scale, by scale."""
    rows = 2 if where.is_tiny else 4
    tree = config_of(Setup(device=where.device, is_tiny=where.is_tiny, members=rows, guidance=4.5)).model_dump(
        mode="json"
    )
    tree["model"]["dtype"] = "float32" if is_exact else dtype
    config = parse_config(tree)
    torch.manual_seed(0)
    backbone = random_backbone(config.model, is_tiny=where.is_tiny, device=where.device)
    for weight in backbone.transformer.parameters() if is_exact else ():
        weight.copy_(weight.to(getattr(torch, dtype)))
    lora = random_lora(backbone.transformer, config.model)
    torch.manual_seed(1)
    log_probs, _ = pairs_of(policy_of(backbone, config), config, rows)
    advantages = torch.tensor([1.0, -1.0], device=where.device).repeat(rows // 2)
    found = []
    for scale in scales:
        (scale / PAIRS * (log_probs() * advantages).sum()).backward()
        found.append({name: each.grad / scale for name, each in lora.parameters.items() if each.grad is not None})
        for each in lora.parameters.values():
            each.grad = None
    return found


def _compared(exact: dict[str, Tensor], found: dict[str, Tensor], part: str) -> Figures:
    truth, guess = (
        torch.cat([each.flatten() for name, each in side.items() if part in name]) for side in (exact, found)
    )
    return {
        "relative error": float((guess - truth).norm() / truth.norm()),
        "share of zeros": float((guess == 0).double().mean()),
        "share of zeros in float32": float((truth == 0).double().mean()),
        "share that is not finite": float((~guess.isfinite()).double().mean()),
    }
