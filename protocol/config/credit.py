"""The section `credit`: how rewards become advantages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.config.section import Decay, Section, Weight
from protocol.errors import ConfigError, named_line
from protocol.ground.import_path import find_function, is_path, require_known


@dataclass(frozen=True)
class RuleNeeds:
    """What a credit rule needs. A function of the user's own says so in attributes of these names."""

    needs_points: bool = True
    """It compares rewards along the trajectory, so the points are completed and scored; else only finished images."""
    uses_values: bool = True
    """It takes calibrated values if `credit.values` asks for them; else always rewards."""
    needs_iteration: bool = False
    """It compares trajectories, so no group can train before the iteration's last one is scored."""


RULES: Mapping[str, RuleNeeds] = MappingProxyType(
    {
        "uniform": RuleNeeds(needs_points=False, uses_values=False),
        "gains": RuleNeeds(),
        "gae": RuleNeeds(),
        "turning_point": RuleNeeds(uses_values=False, needs_iteration=True),
        "tree": RuleNeeds(needs_points=False),
    }
)
"""The built-in credit rules; `learner.credit.rules` has their formulas."""


def needs_of(rule: str) -> RuleNeeds:
    """Return what a credit rule needs; the module or file of an import path is imported.

    Raises:
        ConfigError: there is no such function, or it says something else than true or false.
    """
    if not is_path(rule):
        return RULES[rule]
    try:
        function = find_function(rule)
    except ImportError as error:
        raise ConfigError(f"credit.rule {rule} cannot be imported: {named_line(error)}") from error
    needs_points = getattr(function, "needs_points", True)
    needs = {
        "needs_points": needs_points,
        "uses_values": getattr(function, "uses_values", needs_points),
        "needs_iteration": getattr(function, "needs_iteration", False),
    }
    for name, value in needs.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} of credit.rule {rule} must be True or False, got {value!r}")
    return RuleNeeds(**needs)


class StepWeightConfig(Section):
    """Step weights: one factor for each denoising step; they multiply advantages after normalisation and clip."""

    rule: Literal["none", "piecewise", "noise", "table"] = "noise"
    """`none`: all 1; `piecewise`: `early`, `middle` and `late`; `noise`: a power of the step's std, divided by the mean
    of that power; `table`: the numbers of `table`."""
    early: float = Field(default=1.8, ge=0.0)
    """`piecewise`: weight of the steps in the first quarter of the schedule, at least 0."""
    middle: float = Field(default=1.0, ge=0.0)
    """`piecewise`: weight of the steps in the middle half, at least 0."""
    late: float = Field(default=1.3, ge=0.0)
    """`piecewise`: weight of the steps in the last quarter, at least 0."""
    noise_power: float = Field(default=2.0, ge=0.0)
    """`noise`: the power of the std, at least 0. 1 is TempFlow-GRPO's. 2 cancels the 1 / std^2 of the log-prob, so that
    the squared error of every step counts equally."""
    noise_constant: float | None = Field(default=None, gt=0.0)
    """`noise`: if set, a weight is this number times the power of the std, without the division by its mean; 2.25 in
    TempFlow-GRPO's released code."""
    table: tuple[Weight, ...] = ()
    """`table`: one weight of at least 0 for each of the T steps."""

    @model_validator(mode="after")
    def _trains(self) -> "StepWeightConfig":
        if self.rule == "table" and self.table and not any(self.table):
            raise ValueError(
                f"credit.step_weights.table must hold a weight above 0, got {list(self.table)}: no step would train;"
                " raise one"
            )
        if self.rule == "piecewise" and not any((self.early, self.middle, self.late)):
            raise ValueError(
                "credit.step_weights must have early, middle or late above 0, got 0 for all: no step would train;"
                " raise one"
            )
        return self


class TurningPointConfig(Section):
    """TP-GRPO's options; the defaults are the paper's constrained version."""

    is_consistent: bool = True
    """Select a step only if its own gain and the gain of everything after it have the same sign, so that their sum is
    larger than the step's own gain."""
    has_first_step: bool = True
    """Allow the first step to be selected too."""
    is_balanced: bool = True
    """Keep equally many selected steps with positive and with negative aggregate: the largest of each sign, of equal
    ones the first by group, member and step. An aggregate of 0 counts for neither sign; in the released code it counts
    for the sign of the trajectory's whole change."""


class CreditConfig(Section):
    """How rewards become advantages."""

    rule: str = "gae"
    """Step rewards. `uniform`: the final reward for every step; `tree`: the mean final reward of all members that share
    the step (`sampling.splits`); `gains`: the difference of the values at the step's two points; `gae`: the decayed sum
    of the gains from this step on; `turning_point`: gains, and at turning points the sum of all gains from there on.
    Or a function of your own: a file `folder/mine.py:function` or an import path `package.module:function`."""
    values: Literal["raw", "calibrated"] = "calibrated"
    """Value of a point for `gains`, `gae` and a function of your own. `raw`: its reward. `calibrated`: its reward minus
    the group's mean, times the slope of a regression of final rewards on it over this iteration. For `tree`: `raw`
    compares each branch with the group; `calibrated` subtracts what the other members of the state in which it split
    predict, likewise by the slope of a regression."""
    normalise: Literal["joint", "per_step", "centred", "ema"] = "per_step"
    """`joint`: mean and std over all members and steps of a group, so a step whose rewards mostly have one sign gives
    every member an advantage of that sign; `per_step`: mean and std over the members, for each step; `centred`: the
    mean of each step, the std of all steps; `ema`: each step's running mean over iterations, the std of all steps."""
    scale: Literal["prompt", "iteration"] | Annotated[float, Field(gt=0.0)] = "iteration"
    """What the std is computed over. `prompt`: the prompt's own group; `iteration`: all groups of the iteration, while
    the mean stays the prompt's (Flow-GRPO's `global_std`). A number above 0 is used instead of a std (ELBO policy
    gradients: 10)."""
    ddof: int = Field(default=0, ge=0, le=1)
    """Delta degrees of freedom of the std: 0, or 1 as in DanceGRPO."""
    gae_lambda: float = Field(default=0.3, ge=0.0, le=1.0)
    """Decay of `gae` in [0, 1]: 0 is the step's own gain, 1 the sum of all gains from the step on."""
    ema_decay: Decay = 0.9
    """`ema`: share of the old running mean that an iteration keeps, in [0, 1). 0.9 (ours) averages over about ten
    iterations. A step that occurs for the first time uses its own mean."""
    turning_point: TurningPointConfig = TurningPointConfig()
    """Options of the rule `turning_point`."""
    step_weights: StepWeightConfig = StepWeightConfig()
    """One factor for each denoising step."""
    epsilon: float = Field(default=1e-4, ge=0.0)
    """Number added to the std before the division, at least 0; 1e-4 is Flow-GRPO's."""
    mixture: Literal["rewards", "advantages"] = "rewards"
    """`rewards`: the weighted sum of the scores is one reward. `advantages`: each score is normalised separately, and
    the advantages are summed with the reward weights; the sum is clamped, as in the releases of MixGRPO and
    Granular-GRPO."""
    advantage_clip: float = Field(default=5.0, gt=0.0)
    """Advantages are clamped to plus or minus this number, above 0."""

    @field_validator("scale", mode="before")
    @classmethod
    def _is_a_scale(cls, scale: Any) -> Any:
        if scale not in ("prompt", "iteration") and not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise ValueError(
                f"credit.scale must be `prompt`, `iteration` or a number above 0, got {scale!r}: take one of them"
            )
        return scale

    @model_validator(mode="after")
    def _divides_differences(self) -> "CreditConfig":
        if isinstance(self.scale, float) and self.normalise != "centred":
            raise ValueError(
                f"credit.normalise must be `centred` with a number as credit.scale, got {self.normalise!r}: the"
                " differences from each step's mean are divided by it; set it"
            )
        return self

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        return require_known("credit.rule", rule, RULES)
