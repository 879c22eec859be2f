"""The status documents of a run: on the board, in the status API and in the run folder's `status.json`.

All times are seconds since 1970 (UTC); numbers that are not known or not finite are null. `SCHEMA` grows when a field
changes its meaning or goes; readers ignore fields they do not know.
"""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from protocol.errors import plain

SCHEMA = 1
"""Version of the documents of this file."""
RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
POOL = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$"
RunId = Annotated[str, StringConstraints(pattern=RUN_ID)]
Phase = Literal["starting", "running", "paused", "stopping", "finished", "stopped", "failed"]
ENDED: frozenset[Phase] = frozenset(("finished", "stopped", "failed"))
"""Phases after which nothing more happens."""
ActorState = Literal["waiting", "starting", "idle", "busy", "ended"]


FIXED_SIZE = (
    "its size is fixed, since the run is one process (--local) or has cluster.layout colocated or joint: stop it and go"
    " on with other sizes in its config"
)
"""Why a pool that is not resizable cannot be scaled."""


class Document(BaseModel):
    """Base of all documents."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """Read a document that another program wrote, all its texts as `plain` ones.

        Raises:
            ValueError: it is none.
            RecursionError: it is nested too deeply.
        """
        return cls.model_validate(_plain(json.loads(text)))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {plain(key): _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


class Condition(Document):
    """One statement about the run, in the manner of Kubernetes. A condition that is `True` is good."""

    type: str
    """What it is about, e.g. `BoardConnected`, `PoolSettled/rollout`; there is one condition of a type."""
    status: Literal["True", "False", "Unknown"]
    reason: str
    """One word in CamelCase for programs."""
    message: str
    """One sentence for people: what is, and what to do."""
    since: float
    """When `status` last changed."""


class Usage(Document):
    """What an actor uses."""

    memory_bytes: int | None = None
    """Memory of its process."""
    gpu_memory_bytes: int | None = None
    """Memory in use on its GPU, by all processes; null without a GPU, or without NVML (`pip install nvidia-ml-py`)."""
    gpu_share: float | None = None
    """Share of the last second in which its GPU computed; null without a GPU, or without NVML."""


class ActorStatus(Document):
    """One actor."""

    name: str
    """Kind and slot, e.g. `rollout-0`; an actor that replaces a dead one takes over its slot."""
    kind: str
    """`rollout`, `reward/<scorer>` or `learner`."""
    state: ActorState
    """`waiting`: has no node yet; `starting`: loads its model or scorer; `ended`: its run has ended."""
    node: str = ""
    """Host name of its node."""
    node_id: str = ""
    """Ray's id of that node."""
    pid: int | None = None
    adapter_version: int | None = None
    """Version of the adapter that it holds."""
    adapter_digest: str | None = None
    """First 12 characters of the digest that it confirmed for that version."""
    last_seen: float | None = None
    """When it last answered."""
    calls: int = 0
    """Calls that it answered."""
    calls_per_minute: float = 0.0
    """Over its newest answers."""
    restarts: int = 0
    """Actors that failed in this slot."""
    busy_share: float | None = None
    """A learner worker's share of the newest iteration, up to the end of its update, in which it worked."""
    fetched_bytes: int | None = None
    """Bytes of trajectories that a learner worker fetched for the newest update."""
    usage: Usage = Usage()


class PoolStatus(Document):
    """A set of actors of one kind."""

    name: str
    desired: int
    """The size that was asked for."""
    ready: int
    """Actors that take work."""
    busy: int
    waiting: int = 0
    """Actors that have no node yet."""
    queue: int = 0
    """Calls that wait for an idle actor."""
    restarts: int = 0
    max_restarts: int | None = None
    busy_share: float | None = None
    """Share of the last iteration's wall time in which its actors worked."""
    is_resizable: bool = True
    """False in a run with `--local`, and for bundles (`cluster.layout`)."""
    held_for: str = ""
    """The role without an actor to which it leaves the room of the cluster meanwhile."""
    trouble: str = ""
    """Why it has not reached the desired size, or why it is paused."""


class Rewards(Document):
    """The training reward."""

    now: float | None = None
    """Mean of the newest iteration."""
    trend: float | None = None
    """Change over 10 iterations: least-squares slope of the newest 20, times 10; none before 10 have a reward."""
    trend_error: float | None = None
    """Standard error of `trend`: a trend within two of them may be chance."""
    components: dict[str, float | None] = {}
    """Each further reading of the newest iteration, by name."""
    heldout: float | None = None
    """Score of the newest evaluation."""
    heldout_first: float | None = None
    """Score of the first evaluation; null as long as it is the newest."""
    heldout_iteration: int | None = None
    heldout_change: tuple[float, float] | None = None
    """95 % interval of `heldout` minus `heldout_first` over the held-out prompts; it holds 0 if that may be chance."""


class Bottleneck(Document):
    """Which side the run waits for most."""

    side: str
    """`learner`, `publish` or the name of a pool."""
    share: float
    """Share of the iteration's wall time."""
    message: str


class Event(Document):
    """Something that happened."""

    number: int = 0
    """Counts from 1 within a run's process."""
    time: float
    kind: Literal["info", "warning", "error"]
    message: str


class CreditWords(Document):
    """The credit rule of a run in words for people."""

    name: str
    """The rule, and `calibrated` if it takes calibrated values."""
    rule: str
    """What a step earns."""
    example: str
    """Worked numbers; empty for a rule of the user's own."""


class RunStatus(Document):
    """The state of one run."""

    schema_version: int = SCHEMA
    """A later version than `SCHEMA` is refused."""
    run: RunId
    session: str
    """The process that writes this; another one means that the run was started again."""
    job: str | None = None
    """Submission id of the Ray job whose driver runs it."""
    phase: Phase
    iteration: int
    """Iterations done."""
    iterations: int
    eta_s: float | None = None
    """Seconds to the end: the median time between the ends of the newest 20 iterations, times those that are left."""
    started: float
    """When this session began."""
    updated: float
    """When this was written."""
    heartbeat_s: float = 1.0
    """Seconds between two writings while the run lives."""
    stale_since: float | None = None
    """Set by readers: when the last sign of life came, if the run has neither ended nor reported since."""
    silent_s: float | None = Field(default=None, exclude=True)
    """Set by sources, never stored: seconds since the last sign of life by the board's own clock; None if unknown."""
    method: str = ""
    """The method whose settings the config has, e.g. `stepwise_tree`; empty if there is none."""
    credit: CreditWords | None = None
    """What a step earns."""
    adapter_version: int | None = None
    """Version of the learner's adapter."""
    checkpoint: int | None = None
    """Iteration of the newest checkpoint."""
    rewards: Rewards = Rewards()
    metrics: dict[str, float | None] = {}
    """Numbers of the newest iteration and of the newest evaluation, by their names in docs/metrics.md."""
    staleness: int | None = None
    """Iterations between the oldest adapter that rolled out the newest update's groups and that update."""
    bottleneck: Bottleneck | None = None
    queues: dict[str, int] = {}
    """Groups and images that wait, by the names of docs/metrics.md: `groups/scored`, `images/<scorer>` …"""
    desired_sizes: dict[str, int] = {}
    """Sizes that were asked for while the run goes, by pool."""
    is_pause_requested: bool = False
    pools: list[PoolStatus] = []
    actors: list[ActorStatus] = []
    conditions: list[Condition] = []
    errors: list[Event] = []
    """The newest warnings and errors, except of conditions that hold again."""
    trajectories: list[int] = []
    """Iterations with recorded trajectories."""
    lines: int = 0
    """Lines of the metric stream so far."""
    health: str = ""
    """Set by readers: how the run goes, in one sentence from phase, trend, bottleneck and conditions."""

    @field_validator("schema_version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version > SCHEMA:
            raise ValueError(f"it is of schema_version {version}, and this flowcredit reads up to {SCHEMA}: upgrade it")
        return version


class MetricLine(Document):
    """One line of the metric stream: an iteration's numbers or an evaluation's."""

    seq: int
    """Its number in the stream, from 1; `since` is compared with it."""
    values: dict[str, float | None]


class RecordedTrajectory(Document):
    """One trajectory: the rewards of its clean-image estimates and the credit of its steps.

    With S trained steps it has P = S + 1 points, or 1 (the finished image) where no step has noise.
    """

    member: int
    rewards: list[float | None]
    """[P]; null where an image is not scored, or its score is missing."""
    values: list[float | None] | None = None
    """[P] calibrated values: what each reward predicts of the final one, relative to the group's mean; null if the
    credit rule takes the rewards themselves."""
    step_rewards: list[float | None]
    """[S] what the credit rule gave to each step; the same for members of a tree that share a step."""
    advantages: list[float | None]
    """[S] the weight of each step in the learner's loss."""


class TrajectoryRecord(Document):
    """A few trajectories of one group. Their images are one PNG: a row is a trajectory, a column is a point."""

    iteration: int
    prompt: str
    group_mean: float | None = None
    """Mean reward of the finished images of the whole group."""
    steps: list[int]
    """The trained denoising steps k, [S]."""
    skipped: list[int] = []
    """The steps before which the image is a preview, Tweedie's estimate: it has no reward."""
    width: int
    """Of one image, pixels."""
    height: int
    trajectories: list[RecordedTrajectory]
    png: str
    """Base64."""


class RunSummary(Document):
    """A run in the list of runs."""

    run: RunId
    session: str = ""
    """The process that writes the status; another run of the same name has another one."""
    phase: Phase
    iteration: int
    iterations: int
    updated: float
    stale_since: float | None = None
    reward: float | None = None
    heldout: float | None = None
    heldout_first: float | None = None
    heldout_change: tuple[float, float] | None = None
    method: str = ""
    health: str = ""


def run_id_of(name: str) -> str:
    """Name a run on the board like its folder, with `-` for all but letters, digits, `.`, `_` and `-`."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:100].lstrip("._-")
    return cleaned or "run"


def summary_of(status: RunStatus) -> RunSummary:
    """Summarise a run for the list of runs."""
    rewards = status.rewards
    return RunSummary(
        **status.model_dump(include=set(RunSummary.model_fields)),
        reward=rewards.now,
        heldout=rewards.heldout,
        heldout_first=rewards.heldout_first,
        heldout_change=rewards.heldout_change,
    )
