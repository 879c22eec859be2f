"""Groups and the update."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config.section import Decay, Positive, Section


class GroupConfig(Section):
    """How much is drawn for one iteration."""

    size: int = 24
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
            raise ValueError(f"group.size must be at least 2, got {self.size}: advantages compare samples; raise it")
        if self.size % self.shard:
            raise ValueError(f"group.shard must divide group.size {self.size}, got {self.shard}")
        return self


class KlConfig(Section):
    """How far the policy may go from the model without the adapter."""

    weight: float = Field(default=0.0, ge=0.0)
    """beta; 0 switches the term and its forward off."""
    rule: Literal["full", "no_dt", "velocity"] = "full"
    """`full`: closed-form KL of the step; `no_dt`: the same with a variance without the step size (Flow-GRPO's released
    convention, to which its beta belongs); `velocity`: mean squared difference of the velocities."""


class AverageConfig(Section):
    """Running mean of the adapter (EMA)."""

    decay: Decay = 0.0
    """Largest share of the old mean that an update keeps; early updates keep less. 0 switches it off."""
    every: Positive = 8
    """Optimizer steps between updates of the mean."""


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
    """Optimizer steps of one pass, each over an equal part of the iteration's groups; gradients of its pairs add up."""
    epochs: Positive = 1
    """Passes over the groups of one iteration."""
    step_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of a shard's stochastic steps that is trained, drawn for each shard and pass (DanceGRPO: 0.6)."""
    objective: Literal["clipped", "guarded", "distillation"] = "clipped"
    """`clipped`: PPO's; `guarded`: with GRPO-Guard's ratio; `distillation`: regression onto improved completions."""
    kl: KlConfig = KlConfig()
    average: AverageConfig = AverageConfig()
    probe_every: int = Field(default=50, ge=0)
    """Iterations between replays of one shard that must give the rollout actor's log-probs; 0 never asks."""
    probe_bound: float = Field(default=1e-4, ge=0.0)
    """Largest |ratio - 1| of such a replay; above it the run stops with its reason."""
