"""The sections `group` and `learner`: the groups of an iteration, and the update."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.config.section import Decay, Positive, Section
from protocol.ground.import_path import require_known


class GroupConfig(Section):
    """How many trajectories one iteration needs."""

    size: int = 24
    """Members N of a group, at least 2: trajectories of one prompt, which are compared with each other."""
    shard: Positive = Field(default_factory=lambda given: given.get("size", 1))
    """Members of one shard, the unit of rollout work; it must divide `size`. Left out or null, a group is one shard."""
    per_iteration: Positive = 12
    """Groups of one iteration, at least 1."""
    max_lag: int = Field(default=0, ge=0)
    """Iterations by which the adapter that generates a group may be older than the adapter that trains on it; 0 is
    on-policy."""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, tree: Any) -> Any:
        is_whole = isinstance(tree, dict) and tree.get("shard", 1) is None
        return {key: value for key, value in tree.items() if key != "shard"} if is_whole else tree

    @model_validator(mode="after")
    def _comparable(self) -> "GroupConfig":
        if self.size < 2:
            raise ValueError(f"group.size must be at least 2, got {self.size}: advantages compare members; raise it")
        if self.size % self.shard:
            raise ValueError(f"group.shard must divide group.size {self.size}, got {self.shard}: take a divisor of it")
        return self

    @property
    def shards(self) -> int:
        return self.per_iteration * self.size // self.shard


class KlConfig(Section):
    """The penalty on the distance between the policy and the base model, which is the model without the adapter."""

    weight: float = Field(default=0.0, ge=0.0)
    """beta, at least 0; 0 switches the term and its forward off."""
    rule: Literal["full", "no_dt", "velocity"] = "full"
    """`full`: the closed-form KL of a step; `no_dt`: the same with a variance without the step size h, as in
    Flow-GRPO's released code and for its beta; `velocity`: the mean squared difference of the velocities."""


class AverageConfig(Section):
    """The running mean (EMA) of the adapter."""

    decay: Decay = 0.0
    """Largest share of the old mean that an update of the mean keeps, in [0, 1); early updates keep less. 0 switches
    the mean off."""
    every: Positive = 8
    """Optimizer steps between updates of the mean, at least 1."""
    repeats: Positive = 1
    """Repetitions of each update of the mean, at least 1; the kept share d becomes d^repeats. Flow-GRPO's released code
    repeats it for each micro-batch of a device that one optimizer step accumulates: 2 times on 32 GPUs, 4 times on 4
    GPUs and on one."""


class RateDecay(Section):
    """A linear decay of the learning rate, from `learner.learning_rate` in the first iteration."""

    iterations: Positive
    """Iterations until the learning rate is `to`, at least 1. It stays there, however long the run is, so a run that is
    made longer keeps its first part. From 3e-3 to 5e-4 in 5: 3e-3, 2.5e-3, 2e-3, 1.5e-3, 1e-3, and 5e-4 from the sixth
    iteration on."""
    to: float = Field(gt=0.0)
    """Learning rate after the decay, above 0 and at most `learner.learning_rate`."""


class ForwardConfig(Section):
    """The objectives of the forward process."""

    beta: float = Field(default=1.0, gt=0.0, le=1.0)
    """`nft`: beta in (0, 1]; v+ and v- lie beta (v - v_old) away from v_old, one forwards and one backwards."""
    power: float = Field(default=0.25, gt=0.0, le=1.0)
    """`awm`: p in (0, 1], the power of the matching loss; 1 is the plain mean square."""
    preference: float = Field(default=100.0, gt=0.0)
    """`dgpo`: beta of the group's weight, above 0. With a larger beta, a group that the policy already prefers loses
    its weight sooner."""
    compared: Literal["base", "old"] = "base"
    """`dgpo`: whom the policy is compared with in the group's weight: the KL's reference, or the adapter `old`. For
    this weight the policy, `old` and, if it is needed, the reference are evaluated once more, without a gradient and in
    pieces of `learner.batch`."""
    clip_range: float = Field(default=1e-2, gt=0.0)
    """`dgpo`: c, above 0. A member has no gradient if its matching loss lies further than this from its loss under
    `old`, in the direction of its advantage."""
    loss: Literal["epg", "pepg", "par"] = "pepg"
    """`elbo`: the policy gradient of the likelihood; `pepg` and `par` also hold the likelihood near `old`'s."""
    has_ratio: bool = True
    """`elbo`: weigh each pair with exp(likelihood - likelihood of `old`)."""
    multiplier: float = Field(default=1.0, gt=0.0)
    """`ram`: m, above 0: how far the target moves from the reference for an advantage of 1."""


class OldConfig(Section):
    """The adapter `old` of the forward objectives: a running mean that moves once in each iteration. Every checkpoint
    holds it in `old/`, and learner workers compare its digest.

    old <- d old + (1 - d) adapter, d = min(rate max(0, n - flat), most), with n the optimizer steps of the run so far.
    """

    rate: float = Field(default=0.001, ge=0.0)
    """Growth per optimizer step of the share d that the adapter `old` keeps; at least 0."""
    flat: int = Field(default=0, ge=0)
    """Optimizer steps before d grows; until then `old` is the trained adapter itself."""
    most: Decay = 0.5
    """Largest d, in [0, 1)."""
    weight: float = Field(default=0.0, ge=0.0)
    """`awm`: weight of mean_d (v - v_old)^2, at least 0; 0 switches the term and its forward off."""
    rolls_out_after: int | None = Field(default=None, ge=0)
    """`dgpo` and `awm`: optimizer steps after which `old` rolls out instead of the trained adapter; null: never. With
    `nft`, `elbo` and `ram` it always does."""


OF_STEPS = ("clipped", "guarded", "masked")
"""Built-in objectives of the steps of a trajectory."""
FORWARD = ("nft", "awm", "dgpo", "elbo", "ram")
"""Objectives of the forward process: they noise clean latents anew and need no log-prob."""
OLD_ROLLS_OUT = ("nft", "elbo", "ram")
"""Objectives for which the adapter `old` rolls out."""


USED_BY: Mapping[str, str] = {
    "forward.beta": "nft",
    "forward.power": "awm",
    "forward.preference": "dgpo",
    "forward.compared": "dgpo",
    "forward.clip_range": "dgpo",
    "forward.loss": "elbo",
    "forward.has_ratio": "elbo",
    "forward.multiplier": "ram",
    "old.weight": "awm",
}
"""The objective that uses a setting of `learner`, where it is one alone."""


class LearnerConfig(Section):
    """The update: optimizer, objective and checks."""

    learning_rate: float = Field(default=3e-4, gt=0.0)
    """AdamW's learning rate, above 0."""
    decay: RateDecay | None = None
    """Linear decay of the learning rate; without it the rate stays as it is."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    adam_epsilon: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon, above 0."""
    weight_decay: float = Field(default=1e-4, ge=0.0)
    """AdamW's decoupled weight decay, at least 0."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient; a longer gradient is scaled down to it."""
    batch: Positive | None = None
    """Maximum number of states in one forward and backward of the learner; null takes `model.forward_batch`. Another
    number than the rollout's needs a device that computes a row with the same bits in both batches; a run checks it at
    its start, with random rows. On a CPU with one thread a row of `toy_geneval` is equal in batches of 4 to 36, off by
    up to 8e-6 in smaller ones."""
    clip_range: float = Field(default=1e-4, gt=0.0)
    """c of the clipped surrogate, above 0. It is small because log-probs are means over latent elements, so ratios stay
    close to 1."""
    updates_per_iteration: Positive = 2
    """Optimizer steps of one pass, at least 1; it must divide `group.per_iteration`. Each step accumulates the
    gradients of an equal part of the iteration's groups."""
    lanes: Positive = 8
    """Lanes L of an optimizer step, a power of two. Shard s of the step adds its gradient to lane s mod L, and the
    lanes are added in a fixed tree. So results depend on L and not on `cluster.learner.workers`, which divides L: take
    the most workers that you may want. A lane takes the memory of an adapter in float32; the workers share them."""
    epochs: Positive = 1
    """Passes over the groups of one iteration, at least 1."""
    step_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of a shard's stochastic steps that is trained, in (0, 1]; the steps are chosen at random for each shard and
    pass (DanceGRPO: 0.6). The mean of their advantages need not be 0."""
    divergence_bound: float = Field(default=1e-5, gt=0.0)
    """tau of the objective `masked`, above 0: how far a step may have moved away from the policy that rolled it out, in
    nats per latent element."""
    objective: str = "clipped"
    """`clipped`: PPO's clipped surrogate; `guarded`: the same with GRPO-Guard's ratio; `masked`: Flow-DPPO's mask by
    the divergence of the step, without a clip; for both, rollouts also carry their means. Of the forward process:
    `nft`, DiffusionNFT; `awm`, Advantage Weighted Matching; `dgpo`, Direct Group Preference Optimization; `elbo`,
    policy gradients of the finished image's likelihood; `ram`, Reinforce Adjoint Matching. Or a function of your own
    for the steps: a file `folder/mine.py:function` or an import path `package.module:function`."""
    forward: ForwardConfig = ForwardConfig()
    """Settings of the forward objectives."""
    old: OldConfig = OldConfig()
    """The adapter `old` of the forward objectives."""
    kl: KlConfig = KlConfig()
    """The KL penalty."""
    norm_guard: float = Field(default=0.0, ge=0.0)
    """lambda of NormGuard, at least 0: weight of the penalty on velocities that are longer than the reference's. Length
    is the root mean square over latent elements (ours: the paper's norm and lambda could not be read); 0 switches the
    term off. Longer velocities are a sign of reward hacking that needs no second scorer: the guard `velocity_norm`
    warns of them wherever the reference is evaluated."""
    average: AverageConfig = AverageConfig()
    """The running mean of the adapter."""
    probe_every: int = Field(default=50, ge=0)
    """Iterations between probes, of which the first iteration has one. A probe replays one shard, which must give the
    rollout actor's log-probs. With `group.max_lag` no other iteration has one: later groups come from older adapters. 0
    switches probes off."""
    probe_bound: float = Field(default=1e-4, ge=0.0)
    """Largest |ratio - 1| of a probe, at least 0; above it the run stops."""

    @field_validator("objective")
    @classmethod
    def _is_known(cls, objective: str) -> str:
        return require_known("learner.objective", objective, (*OF_STEPS, *FORWARD))

    @property
    def needs_reference(self) -> bool:
        """Whether each pair is also evaluated by the KL's reference."""
        compares = self.objective == "dgpo" and self.forward.compared == "base"
        return self.kl.weight > 0 or self.norm_guard > 0 or self.objective == "ram" or compares

    def rolls_out_old(self, steps: int) -> bool:
        """Say whether `old` rolls out, not the trained adapter, after this number of the run's optimizer steps."""
        after = self.old.rolls_out_after
        return self.objective in OLD_ROLLS_OUT or (after is not None and steps > after)

    def rate(self, iteration: int) -> float:
        """Compute the learning rate of an iteration, from 0."""
        if self.decay is None:
            return self.learning_rate
        done = min(1.0, iteration / self.decay.iterations)
        return self.learning_rate + (self.decay.to - self.learning_rate) * done

    @model_validator(mode="after")
    def _uses_its_settings(self) -> "LearnerConfig":
        for key, objective in USED_BY.items():
            name = key.rpartition(".")[2]
            section = self.old if key.startswith("old.") else self.forward
            value = getattr(section, name)
            if objective != self.objective and value != type(section).model_fields[name].default:
                raise ValueError(
                    f"learner.{key} must be left out for objective {self.objective}, got {value!r}: only {objective}"
                    " uses it"
                )
        return self

    @model_validator(mode="after")
    def _falls(self) -> "LearnerConfig":
        if self.decay and self.decay.to > self.learning_rate:
            raise ValueError(
                f"learner.decay.to must be at most learner.learning_rate ({self.learning_rate:g}), got"
                f" {self.decay.to:g}: lower it, raise the learning rate, or set learner.decay=null"
            )
        return self

    @model_validator(mode="after")
    def _forms_a_tree(self) -> "LearnerConfig":
        if self.lanes & (self.lanes - 1):
            raise ValueError(
                f"learner.lanes must be a power of two, got {self.lanes}: the lanes are added in pairs; take"
                f" {1 << (self.lanes.bit_length() - 1)} or {1 << self.lanes.bit_length()}"
            )
        return self
