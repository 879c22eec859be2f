"""The four ports that the training loop is written against.

`actors/` serves them on Ray, `deploy/run/local.py` in one process. Handles are opaque: the loop passes them on and
never looks inside, so large arrays need not visit the process that runs the loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from protocol.messages import (
    Adapter,
    Credit,
    Excerpt,
    GenerateRequest,
    LearnerState,
    Metadata,
    Receipt,
    ScoredGroup,
    Scores,
    ShardRequest,
)
from protocol.status import ActorStatus, PoolStatus

Handle = Any
"""Something that stands for a large message: the message itself, or a reference in an object store."""
Metrics = Mapping[str, float]
"""One iteration's numbers by name."""


class RolloutSource(Protocol):
    """Draws trajectories. Every call ends: in an answer, or in `PoolError` after the source's own deadline."""

    async def rollout(self, request: ShardRequest) -> tuple[Receipt, Handle, Handle]:
        """One shard: receipt, handle of the `Rollout`, handle of its images uint8 [I, H, W, 3]."""
        ...

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, Handle]:
        """Images without exploration: receipt, handle of uint8 [len(prompts), H, W, 3]."""
        ...

    async def fetch(self, images: Handle) -> np.ndarray:
        """The images behind a handle, to show a few of them."""
        ...

    async def excerpt(self, rollout: Handle, images: Handle, *, members: int) -> Excerpt:
        """The first members of a shard with their images made small, to show them."""
        ...


class RewardSource(Protocol):
    """Judges images. Every call ends in scores; what could not be scored is missing with its reason."""

    async def score_for_training(self, images: Handle, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Mixture of the scorers that train over B images, one prompt and one metadata each."""
        ...

    async def score_for_evaluation(
        self, images: Handle, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> Scores:
        """The same mixture, and beside it the readings of the scorers that only evaluate."""
        ...

    def troubles(self) -> Metrics:
        """What went wrong so far (retries, lost calls, missing scores, pauses), by name; empty when nothing did."""
        ...


class LearnerPort(Protocol):
    """Owns the trained adapter."""

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Learn from one iteration's groups; the version grows by one."""
        ...

    async def adapter(self) -> Adapter:
        """The current adapter with version and digest."""
        ...

    async def credit(self, group: int) -> Credit:
        """What the steps of one group (its place in the newest update) earned."""
        ...

    async def state(self) -> LearnerState:
        """Everything needed to go on exactly."""
        ...

    async def restore(self, state: LearnerState) -> None:
        """Take over a saved state."""
        ...


class AdapterSink(Protocol):
    """Brings new adapter to every rollout actor."""

    async def publish(self, adapter: Adapter) -> None:
        """Returns when every rollout actor has answered with this version and digest, or was replaced.

        Raises ContractError when an actor's digest differs.
        """
        ...


@dataclass(frozen=True)
class Ports:
    """The four ports of one run."""

    rollouts: RolloutSource
    rewards: RewardSource
    learner: LearnerPort
    adapters: AdapterSink


class FleetPort(Protocol):
    """All actors of one run: what can be seen of them, and their number."""

    ports: Ports

    async def start(self) -> None:
        """Returns when every actor is ready."""
        ...

    async def restart_learner(self) -> None:
        """A new learner in the state of iteration 0."""
        ...

    def stop(self) -> None:
        """End every actor."""
        ...

    def pools(self) -> list[PoolStatus]:
        """Every pool."""
        ...

    def actors(self) -> list[ActorStatus]:
        """Every actor."""
        ...

    def busy_seconds(self) -> dict[str, float]:
        """Actor seconds spent in calls so far, by pool and for `learner`."""
        ...

    def queues(self) -> dict[str, int]:
        """What waits inside the fleet, by the names of docs/metrics.md."""
        ...

    def scale(self, pool: str, size: int) -> None:
        """Grow or shrink a pool without waiting for it (PoolError: it cannot be resized at all)."""
        ...

    def shortage(self, pool: str) -> str:
        """Why actors of this pool wait for a place; may take a second, so call it from a thread."""
        ...
