"""The update of one iteration in one learner worker, as a value: groups, credit, mini-batches and results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from flow.adapter.lora import adapter_of
from learner.credit.tables import Strides
from learner.update.metrics import PieceStatistics, StepStatistics
from learner.update.micro_batches import ShardTask, StepChoice, shard_tasks
from learner.update.objective import PairLosses
from protocol.config.run import RunConfig
from protocol.messages import Adapter, Credit, LearnerState, ScoredGroup


@dataclass(frozen=True)
class Snapshot:
    """What an update changes, as it was before, copied on the learner's device. Nothing changes these tensors."""

    iteration: int
    adapter: Adapter
    optimizer: Mapping[str, Tensor]
    """As in `LearnerState`."""
    average: Mapping[str, Tensor]
    """The adapter's running mean by parameter name; empty if there is none."""
    old: Mapping[str, Tensor]
    """The adapter `old` by parameter name; empty if there is none."""
    baseline: tuple[float | None, ...]
    """As in `LearnerState`."""

    def state(self) -> LearnerState:
        """Copy it to host memory."""
        return LearnerState(
            iteration=self.iteration,
            adapter=self.adapter,
            optimizer={name: tensor.cpu().numpy() for name, tensor in self.optimizer.items()},
            average=adapter_of(self.average, version=self.iteration) if self.average else None,
            old=adapter_of(self.old, version=self.iteration) if self.old else None,
            baseline=self.baseline,
        )


@dataclass
class MiniBatch:
    """The groups of one optimizer step, as far as the worker has them."""

    first: int
    """Index of its first group in the iteration."""
    size: int
    """Groups of the step."""
    number: int
    """Number of the step in the iteration, from 0."""
    choice: StepChoice
    tasks_by_group: list[list[ShardTask]] = field(default_factory=list)

    def tasks(self, first: int, count: int) -> list[ShardTask]:
        """Return the tasks of `count` groups from group `first` of the iteration on."""
        begin = first - self.first
        return [task for tasks in self.tasks_by_group[begin : begin + count] for task in tasks]

    @property
    def pairs(self) -> int:
        """Trained pairs that have a step reward."""
        return sum(task.pairs for tasks in self.tasks_by_group for task in tasks)

    @property
    def all_pairs(self) -> int:
        """Pairs as if no score were missing; every group has as many as the first."""
        return self.size * sum(task.all_pairs for task in self.tasks_by_group[0])


@dataclass(frozen=True)
class PendingPiece:
    """The result of one piece of a micro-batch, still on the device."""

    order: tuple[int, int, int]
    """As in `PieceStatistics`."""
    k: int
    losses: PairLosses
    total: Float[Tensor, ""]
    """Sum of the losses."""


@dataclass(frozen=True)
class Findings:
    """The results of an update on one worker's shards."""

    pieces: Sequence[PieceStatistics]
    probed: Mapping[str, float]
    work: Mapping[str, float] = field(default_factory=dict)
    """The work of the update, by the names `work/...` of docs/metrics.md."""


@dataclass(frozen=True)
class Finished:
    """The end of an update; the same on every worker."""

    metrics: Mapping[str, float]
    digest: str
    """Digest of the new adapter and of `old`."""


class Update:
    """`Learner.begin` makes it, `feed` and `train` fill it, and `finish` gives it away."""

    def __init__(self, config: RunConfig, before: Snapshot, strides: Strides, *, steps_before: int) -> None:
        """
        Args:
            before: the state to which an update that does not finish returns.
            strides: `FlowPolicy.strides` of the policy that rolled out.
            steps_before: optimizer steps of the run until then.
        """
        self.before = before
        self.steps_before = steps_before
        self.groups: list[ScoredGroup] = []
        self.credits: list[Credit] = []
        self.pending: list[PendingPiece] = []
        self.pieces: list[PieceStatistics] = []
        self.steps: list[StepStatistics] = []
        self.probed: dict[str, float] = {}
        self._strides = strides
        self._turns = config.learner.updates_per_iteration
        self._size = config.group.per_iteration // self._turns
        self._batches = [
            MiniBatch(
                first=turn * self._size,
                size=self._size,
                number=epoch * self._turns + turn,
                choice=StepChoice(fraction=config.learner.step_fraction, seed=config.seed, epoch=epoch),
            )
            for epoch in range(config.learner.epochs)
            for turn in range(self._turns)
        ]

    def add(self, group: ScoredGroup, credit: Credit) -> None:
        """Take the next group of the iteration, with its credit."""
        turn = len(self.groups) // self._size
        for batch in self._batches[turn :: self._turns]:
            number = sum(map(len, batch.tasks_by_group))
            tasks = shard_tasks([group], [credit], choice=batch.choice, first=number, strides=self._strides)
            batch.tasks_by_group.append(tasks)
        self.groups.append(group)
        self.credits.append(credit)

    def batch(self, first: int, epoch: int) -> MiniBatch:
        """Return the mini-batch of a group in a pass over the iteration."""
        return self._batches[epoch * self._turns + first // self._size]
