"""RunConfig: one frozen tree that describes a run; made from a YAML preset and `key=value` overrides.

    config = load_config("my_preset.yaml", overrides=["group.size=16", "credit.rule=uniform"])

Unknown keys are refused with a suggestion, wrong values with rule, value and remedy (`ConfigError`). The string
under each field gives meaning and unit.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
CREDIT_RULES_OF_POINTS = frozenset({"gains"})
"""Credit rules that compare rewards along the trajectory, so that every point must be completed and scored."""


class Section(BaseModel):
    """Base of every part of the tree: frozen, unknown keys and numbers that are not finite refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class LoraConfig(Section):
    """The low-rank adapter that is trained."""

    rank: Positive = 32
    """Inner width of the adapter."""
    alpha: Positive = 64
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    """Ends of the module names in the transformer that receive the adapter."""


class ModelConfig(Section):
    """The pretrained model and how it is asked."""

    path: str
    """A diffusers folder; `pkg://package/folder` names one inside an installed package."""
    max_sequence_length: Positive = 128
    """T5 tokens per prompt; without a T5 encoder as many zero tokens are appended."""
    guidance: float = Field(default=1.0, ge=1.0)
    """Classifier-free guidance weight w of the policy: rollout, training and evaluation alike; 1 costs one forward."""
    lora: LoraConfig = LoraConfig()


class DataConfig(Section):
    """The prompts."""

    train: str
    """Prompt file: .jsonl with a `prompt` key (GenEval metadata lines), or .txt with one prompt a line."""
    heldout: str
    """Prompt file of the evaluation; never trained on."""
    tags: tuple[str, ...] = ()
    """Keep only prompts whose metadata `tag` is one of these; empty keeps all."""


class SamplingConfig(Section):
    """How trajectories are drawn."""

    steps: int = Field(default=10, ge=2)
    """Denoising steps T of a training trajectory."""
    schedule: Literal["sd3", "linear"] = "sd3"
    """Sigma grid: `sd3` is diffusers' doubly shifted one, `linear` runs evenly from 1 to 0."""
    kernel: Literal["flow_sde", "ddim_sde"] = "flow_sde"
    """Transition of a stochastic step."""
    noise_level: float = Field(default=0.7, gt=0.0, le=1.0)
    """a of Flow-SDE, eta of DDIM-SDE."""
    first_step: Literal["clamp", "exclude"] = "clamp"
    """DDIM-SDE has std 0 at sigma 1: `clamp` takes 1 - sigma_1 for 1 - sigma there, `exclude` runs the step as ODE."""
    std_min: float = Field(default=0.02, ge=0.0)
    """Steps whose std is below this run as ODE and are not trained."""
    shared_noise: bool = True
    """All members of a group start from the same initial noise."""


class CompletionConfig(Section):
    """How the clean picture at a point of a trajectory is estimated."""

    rule: Literal["tweedie", "ode"] = "ode"
    """`tweedie`: x - sigma v, no further forward; `ode`: Euler to sigma 0 in `substeps` substeps."""
    substeps: int = Field(default=5, ge=1)
    """T' of `ode`; its first velocity is the main pass's, so a point costs T' - 1 forwards."""


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


class RewardConfig(Section):
    """One scorer of the mixture."""

    scorer: str
    """A built-in name such as `geneval`, or `package.module:Class`."""
    weight: float = 1.0
    """Factor of its score in the sum."""
    args: dict[str, Any] = {}
    """Keyword arguments of the scorer's constructor."""
    actors: Positive = 1
    """Reward actors that score in parallel."""


class EvaluationConfig(Section):
    """Scores on held-out prompts at fixed seeds, without exploration."""

    every: int = Field(default=0, ge=0)
    """Iterations between evaluations; 0 evaluates only at the start and at the end."""
    steps: Positive = 10
    """Euler steps of the ODE."""
    images_per_prompt: Positive = 4
    """Pictures of each held-out prompt."""
    seed: int = 1234
    """Noise seed of the evaluation; apart from the run's seed."""
    component: str = "geneval/strict"
    """The reading that is reported as the score: `reward`, `<reward>` or `<reward>/<component>`."""
    batch: Positive = 48
    """Pictures of one request."""


class CheckpointConfig(Section):
    """What is kept on disk."""

    every: Positive = 10
    """Iterations between checkpoints; one is also written at the end and at a stop."""
    keep: Positive = 3
    """Newest checkpoints that are kept."""


class RoleConfig(Section):
    """What one kind of actor may use."""

    threads: Positive = 1
    """CPU threads of torch; part of the config because sums depend on it."""
    cpus: float = Field(default=1.0, ge=0.0)
    """CPUs that Ray reserves for one actor."""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs that Ray reserves for one actor."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds after which one call counts as failed and the actor is replaced."""


class ClusterConfig(Section):
    """Where it runs. Nothing here but `threads` may change a result, and `gpus`, since a GPU rounds differently."""

    address: str | None = None
    """Ray address; none starts a local cluster on loopback and stops it with the run. RAY_ADDRESS counts as given."""
    rollout_actors: Positive = 2
    """Rollout actors that draw in parallel."""
    max_restarts: int = Field(default=10, ge=0)
    """Dead actors that one pool replaces before the run stops."""
    rollout: RoleConfig = RoleConfig()
    reward: RoleConfig = RoleConfig()
    learner: RoleConfig = RoleConfig()


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
    """The mixture by name; the reward is the weighted sum."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _divisible(self) -> "RunConfig":
        updates, groups = self.learner.updates_per_iteration, self.group.per_iteration
        if groups % updates:
            raise ValueError(
                f"learner.updates_per_iteration must divide group.per_iteration {groups}, got {updates}:"
                " every update takes the same number of groups"
            )
        first = self.evaluation.component.split("/")[0]
        if first != "reward" and first not in self.rewards:
            raise ValueError(
                f"evaluation.component must start with `reward` or one of {sorted(self.rewards)}, got {first!r}"
            )
        return self

    @property
    def scores_points(self) -> bool:
        """Whether the credit rule needs a reward at every point, not only at the final picture."""
        return self.credit.rule in CREDIT_RULES_OF_POINTS

    def to_yaml(self) -> str:
        """The whole tree, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def outcome_fields(self) -> dict[str, Any]:
        """All that may change a result, by dotted key: all but pools, deadlines, checkpoints and length of the run."""
        flat = _flatten(self.model_dump(mode="json"))
        return {key: value for key, value in flat.items() if not _is_free(key)}


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply `key=value` overrides.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value; one line with the remedy.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist: name a preset or a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validate a tree; the first broken rule becomes one line (`ConfigError`)."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0])) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override must read key=value, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"the value of {key} is not YAML, got {text!r}: quote it") from None
    if isinstance(value, str):
        value = _number(value)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"{key} is unknown: {parent} is a value, not a section")
    node[last] = value


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-4 as text; a user means the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    dotted = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {dotted!r}: {hint}"
    if problem["type"] == "missing":
        return f"{dotted} must be given"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    return f"{dotted}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _known_keys(path: list[str]) -> list[str]:
    section: Any = RunConfig
    for part in path:
        if section is dict:
            section = RewardConfig
            continue
        annotation = section.model_fields[part].annotation
        section = dict if get_args(annotation) else annotation
    return list(section.model_fields)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _is_free(key: str) -> bool:
    is_place = key.startswith("cluster.") and not key.endswith(".threads")
    is_pool = key.startswith("rewards.") and key.endswith(".actors") and ".args." not in key
    return is_place or is_pool or key.startswith("checkpoint.") or key == "iterations"
