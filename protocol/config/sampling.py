"""How trajectories are drawn and how their points are completed."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config.section import Positive, Section, Share


class WindowConfig(Section):
    """Which of the steps that can be stochastic are: the others run as ODE, whose image nobody trains."""

    rule: Literal["all", "fixed", "random", "sliding", "branch"] = "all"
    """`fixed`: `size` steps from `first`; `random`: drawn for each iteration; `sliding`: moves by one step; `branch`:
    one step for each shard."""
    size: Positive = 2
    """Steps of a fixed, random or sliding window."""
    first: int = 0
    """First step of the fixed window."""
    within: tuple[Share, Share] = (0.0, 1.0)
    """Part of the schedule in which random and sliding windows lie, as shares of T, rounded down."""
    every: Positive = 25
    """Iterations after which the sliding window moves; past its last place it begins again."""

    def require_inside(self, steps: int) -> None:
        """Raise ValueError when the window does not fit into a schedule of this many steps."""
        if self.rule == "fixed" and not 0 <= self.first <= steps - self.size:
            raise ValueError(
                f"sampling.window must lie inside the schedule, steps 0 to {steps - 1}, got {self.first} to"
                f" {self.first + self.size - 1}: {'raise first' if self.first < 0 else 'lower first or size'}"
            )
        low, high = self.bounds(steps)
        if self.rule in ("random", "sliding") and high - low < self.size:
            raise ValueError(
                f"sampling.window.within must leave room for {self.size} of {steps} steps,"
                f" got {max(0, high - low)}: widen it or lower size"
            )

    def bounds(self, steps: int) -> tuple[int, int]:
        """First step and end of the part in which windows lie."""
        low, high = self.within
        return int(low * steps), int(high * steps)


TOO_LOUD = {
    "ddim_sde": "the root of sigma'^2 - std^2 turns negative",
    "cps": "sin(a pi / 2), the share of noise, falls again",
}
"""What goes wrong above a noise level of 1, by kernel."""


class SamplingConfig(Section):
    """How trajectories are drawn."""

    steps: int = Field(default=10, ge=2)
    """Denoising steps T of a training trajectory."""
    schedule: Literal["model", "linear", "shifted"] = "model"
    """Sigma grid: `model` is the family's own, as its pipeline draws; `linear` runs evenly from 1 to 0; `shifted` is
    `linear` shifted once by 3 (DanceGRPO, MixGRPO)."""
    kernel: Literal["flow_sde", "ddim_sde", "dance_sde", "cps"] = "flow_sde"
    """Transition of a stochastic step."""
    noise_level: float = 0.7
    """a of Flow-SDE and CPS, eta of DDIM-SDE and Dance-SDE."""
    noise_levels: tuple[float, ...] = ()
    """The noise level of each step but the last, instead of one for all; `flowcredit calibrate` writes it."""
    first_step: Literal["clamp", "exclude"] = "clamp"
    """DDIM-SDE has std 0 at sigma 1: `clamp` takes 1 - sigma_1 for 1 - sigma there, `exclude` runs the step as ODE."""
    log_prob: Literal["gaussian", "squared"] = "gaussian"
    """`squared`: CPS's published -(x' - mean)^2, without 1 / (2 std^2) and constants."""
    std_min: float = Field(default=0.02, ge=0.0)
    """Steps whose std is below this run as ODE and are not trained."""
    window: WindowConfig = WindowConfig()
    shared_noise: bool = True
    """All members of a group start from the same initial noise."""

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingConfig":
        named = {"noise_level": self.noise_level} | {f"noise_levels[{k}]": v for k, v in enumerate(self.noise_levels)}
        for key, level in named.items():
            if level <= 0:
                raise ValueError(
                    f"sampling.{key} must be above 0, got {level}: without noise nothing is explored; raise it"
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
        if self.log_prob == "squared" and self.kernel != "cps":
            raise ValueError(
                f"sampling.log_prob must be `gaussian` for {self.kernel}, got 'squared': only CPS was published so"
            )
        self.window.require_inside(self.steps)
        return self


class CompletionConfig(Section):
    """How the clean image at a point of a trajectory is estimated."""

    rule: Literal["tweedie", "ode", "schedule"] = "ode"
    """`tweedie`: x - sigma v, no further forward; `ode`: to sigma 0 in `substeps` substeps; `schedule`: the steps that
    remain of the trajectory's own schedule."""
    substeps: int = 3
    """T' of `ode`; its first velocity is the main pass's, so a point costs T' - 1 forwards."""
    spacing: Literal["even", "schedule"] = "schedule"
    """Substeps of `ode`: even in sigma, or even in steps of the schedule (dense where the schedule is)."""
    solver: Literal["euler", "heun", "adams"] = "adams"
    """`adams`: second order from the velocity before, as many forwards as `euler`; `heun`: about twice as many."""

    @model_validator(mode="after")
    def _has_substeps(self) -> "CompletionConfig":
        if self.substeps < 1:
            raise ValueError(
                f"completion.substeps must be at least 1, got {self.substeps}: 1 is Tweedie's estimate, one more costs"
                " one forward for every point"
            )
        return self
