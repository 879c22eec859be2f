"""The sections `sampling` and `completion`: how trajectories are generated and how their points are completed."""

import math
from typing import Literal

from pydantic import Field, model_validator

from protocol.config.section import Positive, Section, Share


class WindowConfig(Section):
    """Which eligible steps are stochastic and trained; all others are plain ODE steps."""

    rule: Literal["all", "fixed", "random", "sliding", "spread", "branch"] = "all"
    """`all`: every eligible step; `fixed`: `size` steps from `first`; `random`: `size` steps from a random start in
    each iteration; `sliding`: `size` steps that move by one from time to time; `spread`: `size` eligible steps that
    move by one from group to group; `branch`: one step for each shard, which computes the ODE trunk to it anew, with
    shared noise as a single row, so that the trunk has the same bits in all shards."""
    size: Positive = 2
    """Steps of a fixed, random, sliding or spread window, at least 1."""
    first: int = 0
    """First step of the fixed window, from 0."""
    within: tuple[Share, Share] = (0.0, 1.0)
    """Part of the schedule that holds random, sliding and spread windows, and the steps of `branch`: start and end as
    shares of T in [0, 1], rounded down."""
    every: Positive = 25
    """Iterations after which the sliding window moves by one step, at least 1; after its last position it starts again
    at the first."""
    shrinks: bool = False
    """The sliding window continues to the last step of `within`, one step shorter at each further position (MixGRPO's
    released code). Otherwise its last position is the last one that holds `size` steps."""

    def require_inside(self, steps: int) -> None:
        """Check that the window fits into a schedule of `steps` steps.

        Raises:
            ValueError: it does not fit.
        """
        if self.rule == "fixed" and not 0 <= self.first <= steps - self.size:
            raise ValueError(
                f"sampling.window must lie inside the schedule, steps 0 to {steps - 1}, got {self.first} to"
                f" {self.first + self.size - 1}: {'raise first' if self.first < 0 else 'lower first or size'}"
            )
        low, high = self.bounds(steps)
        needed = 1 if self.is_shrinking or self.rule == "branch" else self.size
        if self.rule in ("random", "sliding", "spread", "branch") and high - low < needed:
            raise ValueError(
                f"sampling.window.within must leave room for {needed} of {steps} steps,"
                f" got {max(0, high - low)}: widen it or lower size"
            )

    @property
    def is_shrinking(self) -> bool:
        """Whether the windows at the end are shorter than `size`."""
        return self.rule == "sliding" and self.shrinks

    def bounds(self, steps: int) -> tuple[int, int]:
        """Return the first step of the part that holds the windows, and the step after its last."""
        low, high = (int(share * steps + 1e-9) for share in self.within)  # 0.58 of 50 steps is 28.999999999999996
        return low, high


class IntegrationConfig(Section):
    """How the clean image of a state is found: by the ODE from there to sigma 0."""

    rule: Literal["tweedie", "ode", "schedule"] = "ode"
    """`tweedie`: x - sigma v, without a further forward; `ode`: integrate to sigma 0 in `substeps` substeps;
    `schedule`: integrate along the remaining steps of the trajectory's own schedule."""
    substeps: Positive = 3
    """T' of `ode`, at least 1."""
    spacing: Literal["even", "schedule"] = "schedule"
    """Substeps of `ode`: even in sigma, or even in steps of the schedule (dense where the schedule is dense)."""
    solver: Literal["euler", "heun", "adams", "dpm"] = "adams"
    """`adams`: second order with the previous velocity, as many forwards as `euler`; `dpm`: likewise, DPM-Solver++ 2M,
    in the logarithm of the signal-to-noise ratio; `heun`: second order with about twice as many."""

    def substeps_from(self, share: float) -> int:  # noqa: ARG002
        """Return the substeps of `ode` from a point on that has this share of the schedule before it, in (0, 1]."""
        return self.substeps


TOO_LOUD = {
    "ddim_sde": "sigma'^2 - std^2 under the root turns negative",
    "cps": "sin(a pi / 2), the share of noise, decreases again",
}
"""Kernels whose noise level is at most 1, each with the reason."""


class SamplingConfig(Section):
    """How training trajectories are generated."""

    steps: int = Field(default=10, ge=2)
    """Denoising steps T of a training trajectory, at least 2."""
    schedule: Literal["model", "linear", "shifted"] = "model"
    """Grid of sigmas. `model`: the grid of the model's own pipeline; `linear`: even from 1 to 0; `shifted`: `linear`
    shifted once by 3 (DanceGRPO, MixGRPO)."""
    kernel: Literal["flow_sde", "ddim_sde", "dance_sde", "cps", "ode"] = "flow_sde"
    """Transition of a stochastic step. `ode`: no step has noise; for the objectives of the forward process, which then
    train every step's noise level."""
    noise_level: float = 0.7
    """a of Flow-SDE and CPS, eta of DDIM-SDE and Dance-SDE; above 0, and at most 1 for DDIM-SDE and CPS. Published are
    0.7 for Flow-SDE and 0.3 for Dance-SDE; 0.7 for DDIM-SDE is ours."""
    noise_levels: tuple[float, ...] = ()
    """One noise level per step but the last; empty: `noise_level` for all. `flowcredit calibrate-noise` writes them.
    """
    first_step: Literal["clamp", "exclude"] = "clamp"
    """The first step of DDIM-SDE, whose std is 0 at sigma 1, so that members with shared noise would stay equal and the
    step could not be learnt. `clamp`: use 1 - sigma_1 instead of 1 - sigma there, as Flow-SDE does (ours); `exclude`: a
    plain ODE step."""
    log_prob: Literal["gaussian", "squared"] = "gaussian"
    """`gaussian`: the log-density; `squared`, for CPS only: its published -(x' - mean)^2, without 1 / (2 std^2) and
    constants."""
    std_min: float = Field(default=0.02, ge=0.0)
    """Least std of a stochastic step, at least 0; steps with a smaller std are plain ODE steps and are not trained."""
    merge_std: float = Field(default=0.0, ge=0.0)
    """At least 0. Consecutive steps are merged into one stochastic step until its std is at least this number; 0 merges
    none. Steps that stay below it are plain ODE steps, and outside the window no steps are merged (E-GRPO)."""
    window: WindowConfig = WindowConfig()
    """Which eligible steps are stochastic and trained."""
    shared_noise: bool = True
    """All members of a group start from the same initial noise. So they have one first point; a rule that needs points
    has it completed and scored once (with window `branch` once for each shard)."""
    splits: tuple[Share, ...] = ()
    """Stochastic steps at which each branch splits into two, as shares of a shard's stochastic steps in [0, 1),
    ascending, rounded up; before them the members of a branch, neighbours by index, share state and noise, by the key
    of the first of them (BranchGRPO). After the last split each member is alone. Shards of a group share only the first
    noise. Empty: every member has its own noise from the first stochastic step on."""

    granularities: tuple[Positive, ...] = (1,)
    """How each trajectory ends after its last stochastic step, ascending from 1. 1: along the schedule. g: once more,
    by an ODE over the schedule's next step and then over every g-th one, and at the end one step to sigma 0, however
    long. Every end is an image, and the advantages of all ends are added (Granular-GRPO). A further end costs 1/g of
    the rest of the trajectory and a scored image. A member without a score of one of its ends has no advantage."""
    tail: IntegrationConfig = IntegrationConfig(rule="schedule", solver="euler")
    """How a trajectory continues after its last stochastic step, where it has no noise; with kernel `ode` this is the
    whole trajectory. By default it takes the Euler steps of its schedule. Fewer substeps of second order cost less;
    MixGRPO-Flash does this with DPM-Solver++."""

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingConfig":
        named = {"noise_level": self.noise_level} | {f"noise_levels[{k}]": v for k, v in enumerate(self.noise_levels)}
        for key, level in named.items():
            if level <= 0:
                raise ValueError(
                    f"sampling.{key} must be above 0, got {level}: without noise there is no exploration; raise it"
                )
            if level > 1 and self.kernel in TOO_LOUD:
                raise ValueError(
                    f"sampling.{key} must be at most 1 for {self.kernel}, got {level}:"
                    f" above 1 {TOO_LOUD[self.kernel]}; lower it"
                )
        if self.noise_levels and len(self.noise_levels) != self.steps - 1:
            raise ValueError(
                f"sampling.noise_levels must hold one number for each of {self.steps - 1} steps (all but the last),"
                f" got {len(self.noise_levels)}: calibrate again for this sampling.steps"
            )
        if self.kernel == "ode" and self.noise_levels:
            raise ValueError(
                f"sampling.noise_levels must be empty for kernel ode, got {len(self.noise_levels)} levels: no step has"
                " noise; leave them out or take another kernel"
            )
        if self.kernel == "ode" and self.shared_noise:
            raise ValueError(
                "sampling.shared_noise must be false for kernel ode, got true: members that start from the same noise"
                " would all become the same image"
            )
        if self.log_prob == "squared" and self.kernel != "cps":
            raise ValueError(
                f"sampling.log_prob must be `gaussian` for {self.kernel}, got 'squared': only CPS was published with it"
            )
        if self.merge_std and self.kernel == "ode":
            raise ValueError(
                f"sampling.merge_std must be 0 for kernel ode, got {self.merge_std}: no step has noise; leave it out"
            )
        self.window.require_inside(self.steps)
        self._require_tree()
        if sorted(set(self.granularities)) != list(self.granularities) or self.granularities[:1] != (1,):
            raise ValueError(
                f"sampling.granularities must ascend from 1, got {list(self.granularities)}: the trajectory itself is 1"
            )
        if len(self.granularities) > 1 and self.kernel == "ode":
            raise ValueError(
                f"sampling.granularities must be [1] for kernel ode, got {list(self.granularities)}: no step has noise"
            )
        if self.has_tail and len(self.granularities) > 1:
            raise ValueError(
                "sampling.tail must be {rule: schedule, solver: euler} for granularities beyond [1], which have ends of"
                f" their own, got rule {self.tail.rule} and solver {self.tail.solver}: leave it out"
            )
        if self.kernel == "ode" and self.tail.rule != "schedule":
            raise ValueError(
                f"sampling.tail.rule must be `schedule` for kernel ode, got {self.tail.rule!r}: the noise levels of the"
                " schedule train; leave it out, or set sampling.steps"
            )
        return self

    @property
    def has_tail(self) -> bool:
        """Whether trajectories leave their schedule after the last stochastic step."""
        return self.tail.rule != "schedule" or self.tail.solver != "euler"

    def _require_tree(self) -> None:
        if not self.splits:
            return
        if sorted(set(self.splits)) != list(self.splits):
            raise ValueError(f"sampling.splits must ascend, got {list(self.splits)}: sort them, each once")
        needed = {"shared_noise": True, "merge_std": 0.0}
        for key, value in needed.items():
            if getattr(self, key) != value:
                raise ValueError(
                    f"sampling.{key} must be {value} with sampling.splits, got {getattr(self, key)}: set it"
                )


class CompletionConfig(IntegrationConfig):
    """How the clean image at a point of a trajectory is estimated. All points of a shard are completed in one batch,
    each on its own grid; `model.forward_batch` bounds the batch."""

    every: Positive = 1
    """Distance between two completed points, at least 1. The point before the first stochastic step and every
    `every`-th one after it are completed and scored. The steps between two scored points share equally what they earned
    together."""
    substeps: Positive = 5
    """T' of `ode`, at least 1. The main pass gives the velocity of the first substep, so a point of J substeps costs
    J - 1 forwards."""
    tapers: bool = True
    """Later points take fewer substeps of `ode`, so that all substeps are about equally long: point k takes its share
    of T', rounded up. The share is sigma_k with spacing `even` and (T - k) / T with `schedule`."""

    def substeps_from(self, share: float) -> int:
        """Return J, the substeps of `ode` from a point on that has this share of the schedule before it, in (0, 1]."""
        return max(1, math.ceil(self.substeps * share - 1e-6)) if self.tapers else self.substeps
