"""From rewards to advantages."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config.section import Decay, Section, Weight

CREDIT_RULES_OF_POINTS = frozenset({"gains", "gae", "turning_point"})
"""Credit rules that compare rewards along the trajectory, so that every point must be completed and scored."""


class StepWeightConfig(Section):
    """Factors of the steps, by which advantages or step rewards are multiplied."""

    rule: Literal["none", "piecewise", "noise", "table"] = "noise"
    """`piecewise`: early, middle, late; `noise`: a power of the step's std over its mean; `table`: given."""
    early: float = Field(default=1.8, ge=0.0)
    """Weight of steps before a quarter of the schedule."""
    middle: float = Field(default=1.0, ge=0.0)
    """Weight of the steps between."""
    late: float = Field(default=1.3, ge=0.0)
    """Weight of steps after three quarters of the schedule."""
    noise_power: float = Field(default=2.0, ge=0.0)
    """`noise`: power of the std. 1: TempFlow-GRPO's; 2 takes back the 1 / std^2 of the log-prob, so that every step's
    squared error counts alike."""
    noise_constant: float | None = Field(default=None, gt=0.0)
    """`noise`: this times the power of the std, not divided by its mean (2.25 in TempFlow-GRPO's released code)."""
    table: tuple[Weight, ...] = ()
    """One weight for each step of the schedule."""
    mean_one: bool = False
    """Scale the weights so that their mean over the schedule is 1."""
    order: Literal["after", "before"] = "after"
    """Multiply advantages after the normalisation and the clip, or step rewards before it."""

    @model_validator(mode="after")
    def _trains(self) -> "StepWeightConfig":
        if self.rule == "table" and self.table and not any(self.table):
            raise ValueError(
                f"credit.step_weights.table must hold a weight above 0, got {list(self.table)}: no step would train;"
                " raise one"
            )
        if self.rule == "piecewise" and not any(self._parts):
            raise ValueError(
                "credit.step_weights must have early, middle or late above 0, got 0 for all: no step would train;"
                " raise one"
            )
        given = self.table if self.rule == "table" else self._parts if self.rule == "piecewise" else ()
        if self.order == "before" and 0.0 in given:
            raise ValueError(
                "credit.step_weights.order must be `after` where a weight is 0, got 'before': the normalisation would"
                " make something of a step reward of 0"
            )
        return self

    @property
    def _parts(self) -> tuple[float, float, float]:
        return self.early, self.middle, self.late


class TurningPointConfig(Section):
    """TP-GRPO's choices; the defaults are the paper's constrained version."""

    is_consistent: bool = True
    """Select only where the step and all that follows agree in sign, so that the aggregate is the larger."""
    has_first_step: bool = True
    """The first step may be selected too."""
    is_balanced: bool = True
    """As many rewarded as punished selections, the largest of each sign."""


class CreditConfig(Section):
    """From rewards to advantages."""

    rule: Literal["uniform", "gains", "gae", "turning_point"] = "gae"
    """`uniform`: the final reward for every step; `gains`: each step's reward difference; `gae`: decayed sum of the
    gains from this step on; `turning_point`: gains, at turning points all that is gained from there."""
    values: Literal["raw", "calibrated"] = "calibrated"
    """What a point is worth to `gains` and `gae`. `raw`: its reward; `calibrated`: its lead over the group times the
    slope with which final rewards follow it in this iteration."""
    normalise: Literal["joint", "per_step", "centred", "ema"] = "per_step"
    """`joint`: mean and std over all members and steps of a prompt; `per_step`: over the members, for each step;
    `centred`: mean of each step, std of all; `ema`: baseline of each step over the iterations, std of all."""
    scale: Literal["prompt", "iteration"] = "iteration"
    """Whose values the std is taken over: the prompt's own group, or all groups of the iteration."""
    ddof: int = Field(default=0, ge=0, le=1)
    """Degrees of freedom taken from the std: 0, or 1 as DanceGRPO."""
    gae_lambda: float = Field(default=0.3, ge=0.0, le=1.0)
    """Decay of `gae`: 0 is the gain alone, 1 all that follows."""
    ema_decay: Decay = 0.9
    """Share of the old baseline that an iteration keeps, for `ema`."""
    turning_point: TurningPointConfig = TurningPointConfig()
    step_weights: StepWeightConfig = StepWeightConfig()
    epsilon: float = Field(default=1e-4, ge=0.0)
    """Added to the std."""
    mixture: Literal["rewards", "advantages"] = "rewards"
    """`rewards`: the weighted sum of raw scores is one reward; `advantages`: each reward is normalised by itself and
    the weighted sum of advantages trains."""
    advantage_clip: float = Field(default=5.0, gt=0.0)
    """Advantages are clamped to plus or minus this."""

    @model_validator(mode="after")
    def _weights_act(self) -> "CreditConfig":
        weights = self.step_weights
        if weights.rule != "none" and weights.order == "before" and self.normalise == "per_step":
            raise ValueError(
                "credit.step_weights.order must be `after` with per_step normalisation, got 'before':"
                " each step is divided by its own std, so a weight cancels"
            )
        return self
