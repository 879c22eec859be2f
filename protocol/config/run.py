"""RunConfig: one frozen tree that describes a run. `deploy.presets` reads it from YAML and overrides.

The string under each field gives meaning and unit.
"""

from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from protocol.config.cluster import ClusterConfig
from protocol.config.credit import CREDIT_RULES_OF_POINTS, CreditConfig
from protocol.config.guards import GuardsConfig
from protocol.config.learning import GroupConfig, LearnerConfig
from protocol.config.model import ModelConfig
from protocol.config.reward import RewardConfig, is_place, require_sound, trained_weights
from protocol.config.sampling import CompletionConfig, SamplingConfig
from protocol.config.section import Positive, Section
from protocol.config.status import StatusConfig


class DataConfig(Section):
    """The prompts."""

    train: str
    """Prompt file: .jsonl with a `prompt` key (GenEval metadata lines), or .txt with one prompt a line."""
    heldout: str
    """Prompt file of the evaluation; never trained on."""
    tags: tuple[str, ...] = ()
    """Keep only prompts whose metadata `tag` is one of these; empty keeps all."""


class EvaluationConfig(Section):
    """Scores on held-out prompts at fixed seeds, without exploration."""

    every: int = Field(default=0, ge=0)
    """Iterations between evaluations; 0 evaluates only at the start and at the end."""
    steps: Positive = 10
    """Euler steps of the ODE."""
    images_per_prompt: Positive = 4
    """Images of each held-out prompt."""
    seed: int = 1234
    """Noise seed of the evaluation; apart from the run's seed."""
    component: str = "reward"
    """Score that an evaluation reports: `reward` (the mixture), `<reward>`, or `<reward>/<component>`."""
    batch: Positive = 48
    """Images of one request."""
    adapter: Literal["trained", "average"] = "trained"
    """Which adapter draws: the trained one, or its running mean (`learner.average`)."""


class CheckpointConfig(Section):
    """What is kept on disk."""

    every: Positive = 10
    """Iterations between checkpoints; one is also written at the end and at a stop."""
    keep: Positive = 3
    """Newest checkpoints that are kept."""
    keep_hours: float = Field(default=0.0, ge=0.0)
    """Older ones are kept as well while they are younger than this many hours."""
    url: str | None = None
    """fsspec URL, e.g. s3://bucket/run: every checkpoint is copied there, and an empty run folder is filled from it."""


SCORE_SDES = ("flow_sde", "dance_sde")
"""Kernels that add noise to the ODE and correct its drift by the score: their std is g sqrt(h)."""


class RunConfig(Section):
    """Everything that a run depends on."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of all training noise, of the prompt order and of the adapter's start."""
    iterations: Positive
    """Iterations: each draws, scores and learns from `group.per_iteration` groups."""
    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    completion: CompletionConfig = CompletionConfig()
    group: GroupConfig = GroupConfig()
    credit: CreditConfig = CreditConfig()
    learner: LearnerConfig = LearnerConfig()
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """The mixture by name, and scorers that only evaluate; `credit.mixture` says how it is mixed."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()
    cluster: ClusterConfig = ClusterConfig()
    status: StatusConfig = StatusConfig()

    @model_validator(mode="after")
    def _divisible(self) -> "RunConfig":
        updates, groups = self.learner.updates_per_iteration, self.group.per_iteration
        if groups % updates:
            raise ValueError(
                f"learner.updates_per_iteration must divide group.per_iteration {groups}, got {updates}:"
                " every update takes the same number of groups"
            )
        self._require_one_method()
        first = self.evaluation.component.split("/")[0]
        if first != "reward" and first not in self.rewards:
            raise ValueError(
                f"evaluation.component must start with `reward` or one of {sorted(self.rewards)}, got {first!r}"
            )
        require_sound(self.rewards)
        return self

    def _require_one_method(self) -> None:
        """Sampling, credit and objective must fit each other."""
        kernel, learner, weights = self.sampling.kernel, self.learner, self.credit.step_weights
        if learner.kl.weight and learner.kl.rule == "no_dt" and kernel not in SCORE_SDES:
            raise ValueError(
                f"learner.kl.rule no_dt needs a kernel whose std is g sqrt(h), one of {list(SCORE_SDES)},"
                f" got {kernel!r}: take `full`"
            )
        if learner.objective == "guarded" and kernel not in SCORE_SDES:
            raise ValueError(
                f"learner.objective guarded needs a kernel whose std is g sqrt(h), one of {list(SCORE_SDES)},"
                f" got {kernel!r}: take `clipped`"
            )
        if self.sampling.window.rule == "branch" and self.group.shard < 2:
            raise ValueError(
                f"group.shard must be at least 2 with sampling.window.rule branch, got {self.group.shard}: the members"
                " of a shard are the branches that are compared at its step; raise it"
            )
        if self.credit.mixture == "advantages" and self.credit.normalise == "ema":
            raise ValueError(
                "credit.mixture advantages normalises each reward by itself, got credit.normalise ema, which keeps one"
                " running mean: take joint, per_step or centred"
            )
        if learner.objective == "distillation" and not self.scores_points:
            raise ValueError(
                f"learner.objective distillation needs completed points, got credit.rule {self.credit.rule!r}:"
                " take gains"
            )
        if weights.rule == "table" and len(weights.table) != self.sampling.steps:
            raise ValueError(
                f"credit.step_weights.table must hold a weight for each of {self.sampling.steps} steps,"
                f" got {len(weights.table)}"
            )
        if self.evaluation.adapter == "average" and not learner.average.decay:
            raise ValueError(
                "evaluation.adapter average needs a running mean, got learner.average.decay 0: set it, 0.9 for instance"
            )

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward that trains."""
        return trained_weights(self.rewards)

    @property
    def scores_points(self) -> bool:
        """Whether the credit rule needs a reward at every point, not only at the final image."""
        return self.credit.rule in CREDIT_RULES_OF_POINTS

    @property
    def held_adapters(self) -> int:
        """Adapters that a rollout actor keeps: those that admitted groups may name, and their running means."""
        return (self.group.max_lag + 1) * (2 if self.evaluation.adapter == "average" else 1)

    def to_yaml(self) -> str:
        """The whole tree, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def outcome_fields(self) -> dict[str, Any]:
        """All that may change a result, by dotted key: not pools, deadlines, checkpoints, guards, status, length."""
        flat = _flatten(self.model_dump(mode="json"))
        flat |= {key: flat[key] > 0 for key in flat if key.startswith("cluster.") and key.endswith(".gpus")}
        return {key: value for key, value in flat.items() if not _is_free(key)}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _is_free(key: str) -> bool:
    is_cluster = key.startswith("cluster.") and not key.endswith((".threads", ".gpus"))
    is_own = key in ("iterations", "model.embedding_cache") or key.startswith(("checkpoint.", "guards.", "status."))
    return is_cluster or is_place(key) or is_own
