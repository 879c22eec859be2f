"""The four ports that the training loop is written against, and the fleet that serves them.

`actors/` serves the ports on Ray, `deploy/run/local.py` in one process. The loop passes handles on and never looks
inside, so large arrays need not visit the process that runs the loop.
"""

from asyncio import Future
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np

from protocol.messages import (
    Adapter,
    Credit,
    Excerpt,
    GenerateRequest,
    LearnerState,
    Prompt,
    Receipt,
    Rollout,
    ScoredGroup,
    Scores,
    ShardReceipt,
    ShardRequest,
)
from protocol.status import ActorStatus, PoolStatus

RolloutHandle = NewType("RolloutHandle", Rollout)
"""Stands for one shard's `Rollout`: the message itself or a reference to it in an object store."""
ImagesHandle = NewType("ImagesHandle", np.ndarray)
"""Stands for images uint8 [I, H, W, 3]: the array itself or a reference to it in an object store."""
Metrics = Mapping[str, float]
"""The numbers of one iteration by name."""


class RolloutSource(Protocol):
    """Makes trajectories and images. Every call ends in an answer, or in `PoolError` after the source's deadline."""

    async def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, RolloutHandle, ImagesHandle]:
        """Roll out one shard: its receipt, its trajectories, and the images to be scored."""
        ...

    def parallel(self) -> int:
        """Count the shards that rollout actors can hold now: one at work each, and one that comes next."""
        ...

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, ImagesHandle]:
        """Make ODE images: a receipt and one image for each prompt of the request."""
        ...

    async def fetch(self, images: ImagesHandle) -> np.ndarray:
        """Fetch the images behind a handle, to show a few of them."""
        ...

    async def excerpt(self, rollout: RolloutHandle, images: ImagesHandle, *, members: int) -> Excerpt:
        """Cut out the first `members` trajectories of a shard with small images, to show them.

        Args:
            members: M, how many trajectories; all if there are fewer.

        Returns:
            M trajectories whose images are at most 128 pixels long.
        """
        ...


class RewardSource(Protocol):
    """Scores images. Every call ends in scores; a missing score has a reason."""

    async def score_for_training(self, images: ImagesHandle, prompts: Sequence[Prompt]) -> Scores:
        """Score images with every scorer that trains and mix the answers.

        Args:
            images: B images.
            prompts: the prompt of each.

        Returns:
            Scores of B images: the mixture as `values`, each scorer's own readings as `components`.
        """
        ...

    async def score_for_evaluation(self, images: ImagesHandle, prompts: Sequence[Prompt]) -> Scores:
        """Score as for training, and add the readings of the scorers that only evaluate to `components`.

        Scorers that train and compare a group are left out; if they only evaluate, they compare the images of a prompt.

        Args:
            images: B images, `evaluation.images_per_prompt` of each prompt, one prompt after the other.
        """
        ...

    def failures(self) -> Metrics:
        """Count what went wrong so far (retries, failed calls, missing scores, pauses); empty if nothing did."""
        ...


class LearnerPort(Protocol):
    """Owns the trained adapter. A dead learner is a `LearnerFailedError`."""

    async def update(self, groups: Sequence["Future[ScoredGroup]"]) -> Metrics:
        """Learn from one iteration's groups, complete or still being made; the adapter's version grows by one.

        If it is cancelled or raises, the learner's state is the one before.
        """
        ...

    async def adapter(self) -> Adapter:
        """Copy the adapter that rolls out next, with its version and digest; `state` holds the trained one too."""
        ...

    async def credit(self, group: int) -> Credit:
        """Return the credit of one group of the newest update; `Credit.adapter_version` names that update."""
        ...

    async def state(self) -> LearnerState:
        """Copy everything that is needed to resume exactly."""
        ...

    async def restore(self, state: LearnerState) -> None:
        """Resume from a saved state."""
        ...


class AdapterSink(Protocol):
    """Brings an adapter to every rollout actor."""

    async def publish(self, adapter: Adapter) -> None:
        """Return when every rollout actor has confirmed version and digest, or was replaced.

        Raises:
            ContractError: an actor's digest differs.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EvaluationPorts:
    rollouts: RolloutSource
    rewards: RewardSource
    adapters: AdapterSink


@dataclass(frozen=True, kw_only=True)
class Ports(EvaluationPorts):
    learner: LearnerPort


class Fleet(Protocol):
    """All actors of one run: the ports that they serve, their status and their number."""

    @property
    def ports(self) -> Ports:
        """The four ports; the same objects before and after a restart of the learner."""
        ...

    async def start(self) -> None:
        """Return when every actor is ready."""
        ...

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise InputError for a prompt that a scorer cannot score, where only its actors can tell."""
        ...

    async def restart_learner(self) -> None:
        """Replace the learner by one in the state of iteration 0."""
        ...

    def stop(self) -> None: ...

    def pools(self) -> list[PoolStatus]: ...

    def actors(self) -> list[ActorStatus]: ...

    def busy_seconds(self) -> dict[str, float]:
        """Sum the seconds that actors spent in calls so far, by pool and for `learner`."""
        ...

    def queues(self) -> dict[str, int]:
        """Return the lengths of the fleet's queues, by the names of docs/metrics.md."""
        ...

    def scale(self, pool: str, size: int) -> None:
        """Grow or shrink a pool without waiting for it; PoolError if it cannot be resized at all."""
        ...

    def shortage(self, pool: str) -> str:
        """Say why actors of this pool wait for a node; empty if one has room. Takes time: call it in a thread."""
        ...
