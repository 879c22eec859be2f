"""The account of a report: what each side works on, and the images and operations that an iteration makes a second."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.report.runs import SECONDS, Group
from protocol.config.run import RunConfig

SIDES: Mapping[str, Mapping[str, str]] = {
    side: {part: f"work/{part}_seconds" for part in parts}
    for side, parts in {
        "rollout actors": ("sampling", "completing", "decoding"),
        "reward actors": ("scoring",),
        "learner workers": ("crediting", "fetching", "training"),
    }.items()
}
"""The metric of each part of each side's work."""
FORWARDS = ("main_evaluations", "completion_evaluations", "reference_evaluations")
"""Metrics that count rows through the transformer without a backward."""


@dataclass(frozen=True)
class Peak:
    """What the share of the peak (mfu) is relative to."""

    tflops: float
    """10^12 operations a second that one GPU can do at most; without GPUs, the machine."""
    operations: Callable[[RunConfig], tuple[float, float]]
    """Operations of one evaluation of a config, and of one with its backward."""


@dataclass(frozen=True)
class Rates:
    """What a group's iterations made on average."""

    seconds: float
    """Of an iteration."""
    images: float
    """Finished training images a second: one for each trajectory."""
    gpus: float
    """That the run reserves; 0 without any."""
    scored: float | None
    """Images a second that are decoded and scored, with those of completed points."""
    evaluations: float | None
    """Rows through the transformer a second, on both sides."""
    mfu: float | None
    """Share of the peak; None without one."""

    @property
    def images_per_gpu(self) -> float | None:
        """Finished training images a second for each GPU; None without GPUs."""
        return self.images / self.gpus if self.gpus else None


def rates_of(group: Group, peak: Peak | None = None) -> Rates | None:
    """Compute what a group's iterations made on average.

    Args:
        group: its runs have one config but for the seed.
        peak: what the share of the peak is relative to.

    Returns:
        The rates; None before the first iteration.
    """
    seconds, config = group.mean(SECONDS), group.runs[0].config
    if not seconds:
        return None
    counts = {name: group.mean(f"work/{name}") for name in (*FORWARDS, "gradient_evaluations", "images")}
    forwards, gradients = sum(counts[name] or 0.0 for name in FORWARDS), counts["gradient_evaluations"] or 0.0
    gpus = config.reserved.get("GPU", 0.0)
    mfu = None
    if peak and forwards + gradients:
        forward, gradient = peak.operations(config)
        mfu = (forwards * forward + gradients * gradient) / seconds / (peak.tflops * 1e12 * (gpus or 1))
    return Rates(
        seconds=seconds,
        images=config.group.per_iteration * config.group.size / seconds,
        gpus=gpus,
        scored=None if counts["images"] is None else counts["images"] / seconds,
        evaluations=(forwards + gradients) / seconds if forwards + gradients else None,
        mfu=mfu,
    )
