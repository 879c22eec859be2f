"""The account of a report: the work of each side, and the images and operations per second of an iteration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deploy.report.runs import SECONDS, SeedGroup
from protocol.config.run import RunConfig

SIDES: Mapping[str, Sequence[str]] = {
    "rollout actors": ("sampling", "completing", "decoding"),
    "reward actors": ("scoring",),
    "learner workers": ("crediting", "fetching", "training"),
}
"""The parts of each side's work; the metric of a part is `work/PART_seconds`."""
FORWARDS = ("main_evaluations", "completion_evaluations", "reference_evaluations")
"""Metrics that count rows through the transformer without a backward pass."""


@dataclass(frozen=True)
class MfuPeak:
    """The peak that the model FLOPs utilization (mfu) is a share of."""

    tflops: float
    """Highest number of operations per second of one GPU, or of the machine without GPUs, in units of 10^12."""
    operations: Callable[[RunConfig], tuple[float, float]]
    """Returns the operations of one evaluation with a config, and of one with its backward pass."""


@dataclass(frozen=True)
class Rates:
    """Average rates of a group's iterations."""

    seconds: float
    """Seconds per iteration."""
    images: float
    """Finished training images per second: one for each trajectory."""
    gpus: float
    """Number of GPUs that the run reserves."""
    scored: float | None
    """Images decoded and scored per second, completed points included."""
    evaluations: float | None
    """Rows through the transformer per second, in rollout and learner together."""
    mfu: float | None
    """Share of the peak; None if no peak is given."""

    @property
    def images_per_gpu(self) -> float | None:
        """Return the finished training images per second and GPU; None without GPUs."""
        return self.images / self.gpus if self.gpus else None


def rates_of(group: SeedGroup, peak: MfuPeak | None = None) -> Rates | None:
    """Compute the average rates of a group's iterations.

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
