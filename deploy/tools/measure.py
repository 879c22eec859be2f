"""Measures how fast this machine's device computes a preset's model: forwards, gradients and decoded images per second.

Weights, latents and embeddings are random, so the model need not be on this machine. On a CPU a large model is cut to
one layer of each kind and a small image in float32; the measured operations per second then give the rates of the whole
model.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from deploy.tools.estimate import IterationCounts, pass_of
from deploy.tools.fake_memory import CostMeter
from flow.device import best_device, computing
from flow.models.hollow import attach_hollow_adapter, hollow_backbone
from flow.models.located import adapter_config
from protocol.config.cluster import RoleConfig
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, InputError, one_line

ROUNDS = 3
LARGE = 5e10
"""Operations of one forward above which a model is cut on a CPU."""
CUT_PIXELS = 128
CUT = {"dtype": "float32", "vae_dtype": None, "height": CUT_PIXELS, "width": CUT_PIXELS}
"""Config keys of a model that is cut."""
ASSUMED_SHARE = 0.2
"""Share of its bf16 peak that an unmeasured card is assumed to reach in forwards, gradients and decoding: one H100 did
in whole iterations with SD3.5-Medium's architecture (docs/performance.md)."""


@dataclass(frozen=True)
class Card:
    """A GPU by its vendor's data sheet."""

    gb: int
    """Memory in 10^9 bytes."""
    tflops: float
    """Dense bf16 peak."""


CARDS = {
    "H100": Card(80, 989.0),
    "H200": Card(141, 989.0),
    "A100": Card(80, 312.0),
    "L40": Card(48, 362.0),
    "B200": Card(180, 2250.0),
}
"""By a part of the card's name; the A100 is the larger one."""


@dataclass(frozen=True)
class Speed:
    """The measured rates of a model on a device."""

    device: str
    cut: str
    """Describes the cut model that was measured; empty if it was the whole model."""
    rows: int
    """Rows of a forward."""
    forwards: float
    """Forwards of one row of the whole model per second."""
    gradients: float
    """The same with their backward."""
    images: float
    """Images that the VAE decodes per second."""
    tflops: float
    """Rate of forwards for `--tflops`: 10^12 operations per second, as the estimate counts them."""

    def lines(self) -> Iterator[str]:
        yield f"{self.device}: {self.tflops:.3g} TFLOP/s in forwards of {self.rows} rows{self.cut}"
        yield (
            f"{self.forwards:.3g} forwards, {self.gradients:.3g} gradients and {self.images:.3g} decoded images per"
            f" second: use --tflops {self.tflops:.3g} with `train --dry-run`"
        )


def measure(config: RunConfig, counts: IterationCounts) -> Speed:
    """Measure the device of this process: a GPU if there is one, else the CPU.

    Args:
        config: config of the run; a CPU uses as many threads as a rollout actor.
        counts: counts of the whole model, from `deploy.tools.estimate`.

    Raises:
        InputError: the model's config files cannot be read, or the device has too little memory.
    """
    device, threads = best_device(), config.cluster.rollout.threads
    is_cut = device == "cpu" and counts.forward_flops > LARGE
    model = config.model.model_copy(update=CUT if is_cut else {})
    backbone = hollow_backbone(model, device=device, most_layers=1 if is_cut else None)
    attach_hollow_adapter(backbone.transformer, adapter_config(model), within=nullcontext())
    backbone.transformer.to(device)
    most = config.model.forward_batch or config.group.shard
    rows, trained = (1, 1) if is_cut else (min(most, config.group.shard), counts.gradient_rows)
    of_whole = counts.forward_flops, counts.gradient_flops, counts.image_flops
    forward, gradient, image = of_whole if is_cut else (None, None, None)
    try:
        with computing(RoleConfig(threads=threads, gpus=float(device == "cuda"))):
            forwards = _rate(pass_of(backbone, rows, has_gradient=False, device=device), rows, counted=forward)
            gradients = _rate(pass_of(backbone, trained, has_gradient=True, device=device), trained, counted=gradient)
            images = 1 if is_cut else min(config.model.decode_batch or rows, rows)
            latents = torch.randn(images, *backbone.latent_shape, device=device)
            decoded = _rate(lambda: backbone.decode(latents), images, counted=image)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"a forward of {rows} rows and a forward and backward of {trained} must fit into the device, got"
            f" {one_line(error)}: lower model.forward_batch"
        ) from error
    return Speed(
        device=torch.cuda.get_device_name() if device == "cuda" else f"CPU with {threads} threads",
        cut=f", measured with one layer, {CUT_PIXELS} pixels and float32" if is_cut else "",
        rows=rows,
        forwards=forwards,
        gradients=gradients,
        images=decoded,
        tflops=forwards * counts.forward_flops / 1e12,
    )


def find_card(name: str) -> Card | None:
    """Find a GPU by its name; None if it is not in `CARDS`."""
    return next((card for part, card in CARDS.items() if part.lower() in name.lower()), None)


def assumed_tflops(card: str) -> float:
    """Return the TFLOP/s that a card is assumed to reach.

    Raises:
        ConfigError: the card is not in the table.
    """
    found = find_card(card)
    if found is None:
        raise ConfigError(f"--card must be one of {sorted(CARDS)}, got {card!r}: give its rate with --tflops")
    return ASSUMED_SHARE * found.tflops


def _rate(work: Callable[[], object], count: int, *, counted: float | None) -> float:
    """Return how many of the `count` items of `work` are done per second.

    If `counted`, the operations of one item of the whole model, is given, return the rate of such items.
    """
    with CostMeter() as meter:
        work()
    rounds = []
    for _ in range(ROUNDS):
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        rounds.append(time.perf_counter() - began)
    return (meter.flops / counted if counted else count) / min(rounds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
