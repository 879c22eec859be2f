"""Guards against silent wrongness: rules over an iteration's numbers, each with a metric, a condition and a stop rule.

A broken guard sets its condition, and stops the run unless it only warns; the error names the guard, its rule and the
value. By then the iteration's metrics are on disk but not its checkpoint, so the newest checkpoint is from before the
fault. Guards that are not rules over numbers are checked where the fault would enter; `docs/reliability.md` lists them
all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from protocol.config.run import RunConfig
from protocol.errors import (
    ContractError,
    FlowcreditError,
    GuardError,
    NonFiniteError,
    ParityError,
    StaleAdapterError,
)
from protocol.messages import Adapter
from protocol.sink import StatusSink

MANY_ZEROS = 0.1
"""Share of zeros above which a gradient of float16 is wrong by more than a few percent, as
`tests/learner/test_half_precision.py` measures."""
LONGER = 1.05
"""Ratio of lengths above which velocities have grown beyond the reference's: RL's usual drift begins there, 5 to 15 %
(NormGuard, arXiv 2606.27771)."""
BY_ERROR: Mapping[type[FlowcreditError], str] = {
    StaleAdapterError: "adapter_echo",
    ParityError: "parity_probe",
    NonFiniteError: "finite_numbers",
    ContractError: "contract",
}


@dataclass(frozen=True)
class Guard:
    """One rule. The run stops when it is broken in `patience` iterations in a row; without a patience it only warns."""

    name: str
    metric: str
    is_broken: Callable[[float], bool]
    rule: str
    remedy: str
    patience: int | None = 1


class Guards:
    """Checks every iteration, in order, and counts for how long each rule has been broken.

    The counts are part of a checkpoint, so stopping and resuming a run does not reset them.
    """

    def __init__(self, config: RunConfig, sink: StatusSink, *, broken: Mapping[str, int] | None = None) -> None:
        """
        Args:
            broken: counts of the checkpoint from which the run resumes.
        """
        self._guards = guards_of(config)
        self._sink = sink
        self._broken = {guard.name: (broken or {}).get(guard.name, 0) for guard in self._guards}

    @property
    def broken(self) -> dict[str, int]:
        """Number of iterations in a row, for each rule that is broken now."""
        return {name: times for name, times in self._broken.items() if times}

    def check(self, iteration: int, metrics: Mapping[str, float], adapter: Adapter) -> None:
        """Check the numbers of one iteration and the adapter that it made.

        Args:
            iteration: counts from 1.
            metrics: the numbers that the rules check; a rule without its number is skipped.

        Raises:
            GuardError: a rule has been broken in `patience` iterations in a row.
        """
        numbers = {**metrics, **adapter_metrics(adapter, had_contrast=metrics.get("group/zero_variance", 0.0) < 1.0)}
        for guard in self._guards:
            value = numbers.get(guard.metric)
            if value is None:
                continue
            if not guard.is_broken(value):
                self._clear(guard)
                continue
            self._broken[guard.name] += 1
            self._trip(guard, iteration, value)

    def _clear(self, guard: Guard) -> None:
        if self._broken[guard.name]:
            self._broken[guard.name] = 0
            message = f"{guard.metric} obeys its rule again"
            self._sink.condition(f"Guard/{guard.name}", holds=True, reason="Kept", message=message)

    def _trip(self, guard: Guard, iteration: int, value: float) -> None:
        times, patience = self._broken[guard.name], guard.patience
        message = f"guard {guard.name}: {guard.metric} must {guard.rule}, got {value:g} at iteration {iteration}"
        if patience is None:
            message += f"; {guard.remedy}"
        elif patience > 1:
            message += f" (in {times} of {patience} iterations in a row)"
        self._sink.condition(f"Guard/{guard.name}", holds=False, reason="Broken", message=message)
        if patience is not None and times >= patience:
            raise GuardError(f"{message}; {guard.remedy}")


def guard_of(error: BaseException) -> str | None:
    """Return the name of the guard that raises this error; None for other errors and for rules over numbers."""
    return next((name for kind, name in BY_ERROR.items() if isinstance(error, kind)), None)


def adapter_metrics(adapter: Adapter, *, had_contrast: bool) -> dict[str, float]:
    """Compute the adapter's own metrics.

    Returns:
        `adapter/not_finite`: number of elements that are NaN or infinite. `adapter/idle`: 1 if every B is exactly 0,
        else 0; only with `had_contrast`, so only if the iteration had something to learn.
    """
    arrays = adapter.arrays
    second = [array for name, array in arrays.items() if "lora_B" in name]
    metrics = {"adapter/not_finite": float(sum(np.count_nonzero(~np.isfinite(array)) for array in arrays.values()))}
    if second and had_contrast:
        metrics["adapter/idle"] = float(not any(array.any() for array in second))
    return metrics


def guards_of(config: RunConfig) -> tuple[Guard, ...]:
    """Return the rules over numbers, in the order in which they are checked."""
    limits = config.guards
    replay = Guard(
        name="exact_replay",
        metric="train/first_ratio_deviation",
        is_broken=lambda value: not value <= config.learner.probe_bound,
        rule=f"be at most learner.probe_bound {config.learner.probe_bound:g}: rollout and learner agree",
        remedy="check cluster.*.threads, devices and library versions on all nodes",
    )
    underflow = Guard(
        name="whole_gradient",
        metric="train/zero_gradients",
        is_broken=lambda value: value > MANY_ZEROS,
        rule=f"be at most {MANY_ZEROS:g}: float16 holds the small gradients too",
        remedy="train with model.dtype=bfloat16",
        patience=None,
    )
    inflated = Guard(
        name="velocity_norm",
        metric="train/velocity_norm_ratio_mean",
        is_broken=lambda value: value > LONGER,
        rule=f"be at most {LONGER:g}: velocities are no longer than the reference's",
        remedy="look at gallery/: length earns no reward; raise learner.norm_guard",
        patience=None,
    )
    return (
        Guard(
            name="finite_adapter",
            metric="adapter/not_finite",
            is_broken=lambda value: value > 0,
            rule="be 0: every element of the adapter is finite",
            remedy="lower learner.learning_rate and start from a checkpoint with --fork",
        ),
        Guard(
            name="distinct_members",
            metric="group/duplicates",
            is_broken=lambda value: value > 0,
            rule="be 0: no two members of a group end in the same latents",
            remedy=(
                "an ODE from different noise must end in different images: the model is broken; try another adapter"
                if config.sampling.kernel == "ode"
                else "raise sampling.noise_level; if that does not help the noise is broken"
            ),
        ),
        *((replay,) if config.group.max_lag == 0 else ()),
        Guard(
            name="contrast",
            metric="group/zero_variance",
            is_broken=lambda value: value >= 1.0,
            rule="be below 1: some group has rewards that differ",
            remedy="the reward does not tell the images apart: look at gallery/, other prompts or another reward",
            patience=limits.zero_variance_iterations,
        ),
        Guard(
            name="adapter_learns",
            metric="adapter/idle",
            is_broken=lambda value: value > 0,
            rule="be 0: the adapter's B moves away from 0",
            remedy="no gradient reaches the adapter: check model.lora.targets and learner.learning_rate",
            patience=limits.idle_iterations,
        ),
        Guard(
            name="approx_kl",
            metric="train/approx_kl",
            is_broken=lambda value: not value <= limits.max_approx_kl,
            rule=f"be at most guards.max_approx_kl {limits.max_approx_kl:g}",
            remedy="lower learner.learning_rate",
        ),
        Guard(
            name="ratio",
            metric="train/ratio_mean",
            is_broken=lambda value: not abs(value - 1) <= limits.max_ratio_deviation,
            rule=f"lie within guards.max_ratio_deviation {limits.max_ratio_deviation:g} of 1",
            remedy="lower learner.learning_rate",
        ),
        *((underflow,) if config.model.dtype == "float16" else ()),
        inflated,
        Guard(
            name="vae_range",
            metric="work/images_decoded_again",  # absent where it is 0, so the condition stays: one warning a run
            is_broken=lambda value: value > 0,
            rule="be 0: the VAE decodes every image without an overflow",
            remedy="these images were decoded again in float32; with model.vae_dtype=float32 all are, once",
            patience=None,
        ),
    )
