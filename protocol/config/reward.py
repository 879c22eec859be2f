"""The section `rewards`: the scorers, their actors, and what happens when an image gets no score."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from protocol.config.cluster import RoleConfig
from protocol.config.section import CustomResources, Positive, Section


def _are_plain(tree: dict[str, Any]) -> dict[str, Any]:
    """Refuse what a run folder's YAML would give back as something else, for instance a date as a text."""
    try:
        return {name: _plain(value) for name, value in tree.items()}
    except RecursionError:
        raise PydanticCustomError("plain", "input should not hold itself") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    rule = "input should hold texts, finite numbers, truth values, lists and mappings by text, not {odd}; quote it"
    raise PydanticCustomError("plain", rule, {"odd": repr(value)})


Plain = Annotated[dict[str, Any], AfterValidator(_are_plain)]
"""Values by name that are the same after they were written to YAML and read again."""


class RewardConfig(Section):
    """One scorer of the mixture, and its pool of reward actors."""

    scorer: str
    """A built-in name such as `geneval`, a file `folder/mine.py:Class`, or an import path `package.module:Class`.
    `rewards={…}`, and `rewards:` in a file with `base`, add to the rewards of the preset; `rewards.NAME=null` removes
    one."""
    weight: float = 1.0
    """Reward weight: the factor of its score, or of its advantages, in the sum; see `credit.mixture`."""
    args: Plain = Field(default_factory=dict)
    """Keyword arguments of the scorer's constructor."""
    use: Literal["train", "evaluate"] = "train"
    """`train`: its score is part of the reward, or only shown with weight 0; `evaluate`: it scores held-out images only
    and never trains."""
    sees: Literal["image", "group"] = "image"
    """What the scorer gets in one call: `image`, any images; `group`, the finished images of one whole group, or, with
    `use: evaluate`, the held-out images of one prompt, which it compares. It must match what the scorer declares. With
    `group` and `use: train` only finished images may be scored (`credit.rule` uniform or tree), and evaluations skip
    the scorer. A group with a missing score is tried again as a whole; if the scorer raises, none of its images has a
    score."""
    actors: Positive = 1
    """Reward actors that score in parallel, at least 1."""
    batch: Positive = 64
    """Maximum number of images in one call, at least 1. Waiting images are joined across groups, and larger requests
    are split."""
    batch_delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds that an idle actor waits for a full batch; 0 takes the waiting images at once."""
    queue: Positive = 4096
    """Maximum number of images that wait for this scorer, at least 1. Two shards for each rollout actor do not count.
    At this number no further shard is requested, so take at least the images of one shard times the rollout actors."""
    timeout_s: float | None = Field(default=None, gt=0.0)
    """Seconds that one call may take; then it counts as failed and the actor is replaced. null takes
    `cluster.reward.timeout_s`, which also bounds the time to load a scorer."""
    tries: Positive = 3
    """Number of tries per image before `on_failure` decides, at least 1; each try uses another actor if possible."""
    on_failure: Literal["missing", "drop_group", "pause", "fail"] = "missing"
    """What happens to an image without a score after all tries. `missing` masks the two gains that need its score and
    keeps them out of statistics; `drop_group` drops the scores of its whole group; `pause` waits until the scorer works
    again and then goes on by itself, with a new pool if the old one used up its restarts, but an image that fails while
    others succeed is missing; `fail` ends the run with the reason."""
    cpus: float | None = Field(default=None, ge=0.0)
    """CPUs that Ray reserves for one actor; null takes `cluster.reward.cpus`."""
    gpus: float | None = Field(default=None, ge=0.0)
    """GPUs that Ray reserves for one actor; null takes `cluster.reward.gpus`."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom Ray resources that one actor needs in addition to `cluster.reward.resources`, such as `{ocr_node: 1}`."""
    runtime_env: Plain | None = None
    """Ray runtime environment of the actors, such as `{pip: [paddleocr]}`. Then only the actors build the scorer."""

    def reserved(self, role: RoleConfig) -> dict[str, float]:
        """Return what Ray reserves for one actor, by Ray's names; `cluster.reward` holds what this leaves open."""
        own = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return role.reserved | {name: amount for name, amount in own.items() if amount is not None}


def changes_no_score(key: str) -> bool:
    """Tell whether a dotted key is a field of a reward that cannot change a score, such as `rewards.NAME.actors`."""
    _, _, field = key.removeprefix("rewards.").partition(".")
    return key.startswith("rewards.") and field.split(".")[0] not in RESULT_FIELDS


RESULT_FIELDS = frozenset({"scorer", "weight", "args", "use", "sees"})
"""Fields of a reward that can change a result."""
