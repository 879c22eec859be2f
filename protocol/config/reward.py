"""The rewards' part of the config: what is scored, where, and what happens when a score fails."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from protocol.config.section import Positive, Section


class RewardConfig(Section):
    """One scorer of the mixture, and its pool of reward actors."""

    scorer: str
    """A built-in name such as `geneval`, or `package.module:Class`."""
    weight: float = 1.0
    """Factor of its score, or of its advantages, in the sum; see `credit.mixture`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the scorer's constructor."""
    use: Literal["train", "evaluate"] = "train"
    """`train`: part of the reward; `evaluate`: scores held-out images only and never trains."""
    actors: Positive = 1
    """Reward actors that score in parallel."""
    batch: Positive = 64
    """Most images of one call; what waits is joined across groups, and larger requests are cut."""
    batch_delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds that an idle actor waits for a full batch; 0 takes at once what is there."""
    queue: Positive = 4096
    """Images that may be in work at once, being rolled out or waiting for scores; beyond that no shard is requested."""
    timeout_s: float | None = Field(default=None, gt=0.0)
    """Seconds after which one call counts as failed and the actor is replaced; none: `cluster.reward.timeout_s`,
    which is also how long an actor may take to load its scorer."""
    tries: Positive = 3
    """Times that an image is tried, each time by another actor if there is one, before `on_failure` decides."""
    on_failure: Literal["missing", "drop_group", "pause", "fail"] = "missing"
    """An image without a score after all tries: `missing` masks the gains that touch it, `drop_group` sets its whole
    group aside, `pause` waits until the scorer answers again, `fail` ends the run."""
    cpus: float | None = Field(default=None, ge=0.0)
    """CPUs that Ray reserves for one actor; none takes `cluster.reward.cpus`."""
    gpus: float | None = Field(default=None, ge=0.0)
    """GPUs that Ray reserves for one actor; none takes `cluster.reward.gpus`."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that one actor needs, such as `{ocr_node: 1}`."""
    runtime_env: dict[str, Any] | None = None
    """Ray runtime environment of the actors, such as `{pip: [paddleocr]}`; the scorer is then built only there."""


def trained_weights(rewards: Mapping[str, RewardConfig]) -> dict[str, float]:
    """The weight of each reward that trains, by name."""
    return {name: reward.weight for name, reward in rewards.items() if reward.use == "train"}


def require_sound(rewards: Mapping[str, RewardConfig]) -> None:
    """Names stand in metric names and one reward must train (ValueError)."""
    for name in rewards:
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"a reward's name must be letters, digits, _ and -, got {name!r}: it names metrics")
    if not trained_weights(rewards):
        raise ValueError("at least one of rewards must have use=train, got only scorers that evaluate")


def is_place(key: str) -> bool:
    """Whether a dotted key `rewards.NAME.…` says where and how scoring runs, which may not change a score."""
    _, _, field = key.removeprefix("rewards.").partition(".")
    return key.startswith("rewards.") and field.split(".")[0] not in RESULT_FIELDS


RESULT_FIELDS = frozenset({"scorer", "weight", "args", "use"})
"""Fields of a reward that may change a result."""
