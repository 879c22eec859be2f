"""The learner's part of the config: groups, credit and the update."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config_section import Decay, Positive, Section

CREDIT_RULES_OF_POINTS = frozenset({"gains"})
"""Credit rules that compare rewards along the trajectory, so that every point must be completed and scored."""


class GroupConfig(Section):
    """How much is drawn for one iteration."""

    size: int = Field(default=24, ge=1)
    """Members N of a group: trajectories of one prompt that are compared."""
    shard: Positive = 24
    """Members of one unit of rollout work; divides `size`."""
    per_iteration: Positive = 12
    """Groups of one iteration."""
    max_lag: int = Field(default=0, ge=0)
    """Learner updates that may pass between the weights that drew a group and its use; 0 is on-policy."""

    @model_validator(mode="after")
    def _comparable(self) -> "GroupConfig":
        if self.size < 2:
            raise ValueError(f"group.size must be at least 2, got {self.size}: advantages compare samples")
        if self.size % self.shard:
            raise ValueError(f"group.shard must divide group.size {self.size}, got {self.shard}")
        return self


class CreditConfig(Section):
    """From rewards to advantages."""

    rule: Literal["uniform", "gains"] = "gains"
    """`uniform`: the final reward for every step; `gains`: each step's reward difference."""
    normalise: Literal["joint"] = "joint"
    """`joint`: mean and std over all members and steps of a prompt."""
    epsilon: float = Field(default=1e-4, ge=0.0)
    """Added to the std."""
    advantage_clip: float = Field(default=5.0, gt=0.0)
    """Advantages are clamped to plus or minus this."""


class LearnerConfig(Section):
    """The update."""

    learning_rate: float = Field(default=3e-4, gt=0.0)
    """AdamW's step size."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of first and second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=1e-4, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """The gradient is scaled down to this norm."""
    clip_range: float = Field(default=1e-4, gt=0.0)
    """c of the clipped surrogate; ratios of log-prob means are close to 1, hence the small number."""
    updates_per_iteration: Positive = 2
    """Optimiser steps of one iteration, each over an equal part of its groups."""
    probe_every: int = Field(default=50, ge=0)
    """Iterations between replays of one shard that must give the rollout actor's log-probs; 0 never asks."""
    probe_bound: float = Field(default=1e-4, ge=0.0)
    """Largest |ratio - 1| of such a replay; above it the run stops with its reason."""
