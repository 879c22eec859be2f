"""One update by a group of learner workers: which worker does what, and in which order their gradients are added.

The workers never wait for each other: lane sums travel from worker to worker as handles, and the driver of the update
passes the handles on. So a worker that raises ends the update at once, and no worker waits for a dead one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NewType, Protocol, TypeVar

from learner.update.lanes import Gradient, added
from learner.update.learner import Findings, Finished, Learner
from protocol.config.run import RunConfig
from protocol.errors import ContractError
from protocol.messages import ScoredGroup
from protocol.ports import Metrics

GradientHandle = NewType("GradientHandle", Gradient)
"""Stands for a `Gradient`: the mapping itself or a reference to it in an object store."""
FindingsHandle = NewType("FindingsHandle", Findings)
"""Stands for `Findings`."""
GroupsHandle = NewType("GroupsHandle", Sequence[ScoredGroup])
"""Stands for groups: the groups themselves or a reference to them."""

Result = TypeVar("Result")


Coming = asyncio.Future[ScoredGroup]
"""A group that is complete or still being made."""


class Run(Protocol):
    """Runs a function."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """Return the function's result."""
        ...


class Worker(Protocol):
    """A `learner.update.learner.Learner`, in this process or another one. It takes one call at a time."""

    async def begin(self) -> None:
        """Begin the update of an iteration."""
        ...

    async def feed(self, groups: GroupsHandle) -> None:
        """Take the next groups of the iteration."""
        ...

    async def train(self, first: int, count: int, *, epoch: int) -> None:
        """Add the gradients of this worker's shards to its lanes.

        Args:
            first: the first of the fed groups to train on.
            count: how many groups.
            epoch: pass over the iteration, from 0.
        """
        ...

    async def lane_sum(self) -> GradientHandle:
        """Add up this worker's lanes."""
        ...

    async def added(self, one: GradientHandle, other: GradientHandle) -> GradientHandle:
        """Add two gradients."""
        ...

    async def step(self, gradient: GradientHandle, *, first: int, epoch: int) -> None:
        """Take an optimizer step.

        Args:
            gradient: sum of all lanes.
            first: the mini-batch's first group.
            epoch: pass over the iteration, from 0.
        """
        ...

    async def findings(self) -> FindingsHandle:
        """Return the results of the update on this worker's shards."""
        ...

    async def finish(self, findings: Sequence[FindingsHandle]) -> Finished:
        """End the update."""
        ...


async def at_once(work: Callable[[], Result]) -> Result:
    """Run the function now, in this thread."""
    return work()


class NearWorker:
    """A `Worker` in this process."""

    def __init__(self, learner: Learner, run: Run = at_once) -> None:
        """
        Args:
            learner: does the work.
            run: how to call it: `at_once`, or in a thread.
        """
        self._learner = learner
        self._run = run

    async def begin(self) -> None:
        """Begin the update of an iteration."""
        await self._run(self._learner.begin)

    async def feed(self, groups: GroupsHandle) -> None:
        """Take the next groups of the iteration."""
        await self._run(lambda: self._learner.feed(groups))

    async def train(self, first: int, count: int, *, epoch: int) -> None:
        """Add the gradients of this worker's shards to its lanes."""
        await self._run(lambda: self._learner.train(first, count, epoch=epoch))

    async def lane_sum(self) -> GradientHandle:
        """Add up this worker's lanes."""
        return GradientHandle(await self._run(self._learner.lane_sum))

    async def added(self, one: GradientHandle, other: GradientHandle) -> GradientHandle:
        """Add two gradients."""
        return GradientHandle(await self._run(lambda: added(one, other)))

    async def step(self, gradient: GradientHandle, *, first: int, epoch: int) -> None:
        """Take an optimizer step."""
        await self._run(lambda: self._learner.step(gradient, first=first, epoch=epoch))

    async def findings(self) -> FindingsHandle:
        """Return the results of the update on this worker's shards."""
        return FindingsHandle(await self._run(self._learner.findings))

    async def finish(self, findings: Sequence[FindingsHandle]) -> Finished:
        """End the update."""
        return await self._run(lambda: self._learner.finish(findings))


async def update(
    config: RunConfig,
    workers: Sequence[Worker],
    coming: Sequence[Coming],
    *,
    share: Callable[[Sequence[ScoredGroup]], GroupsHandle] = GroupsHandle,
) -> Metrics:
    """Learn from one iteration's groups in `epochs` passes of `updates_per_iteration` optimizer steps.

    If a group's scores alone give its credit, the first pass trains complete groups while later ones are still being
    made, and takes each optimizer step as soon as its groups are complete. The order of sums is the same.

    Args:
        config: the run's config.
        workers: W workers, in the order of their seats; W divides `learner.lanes`.
        coming: the groups of the iteration, in order; complete or still being made.
        share: makes one handle of all groups for all workers, if they are complete before the update.

    Returns:
        Metrics by name.

    Raises:
        ContractError: a group is incomplete or belongs to another iteration, or the workers' adapters differ
            afterwards.
        NonFiniteError: a loss or a gradient is not finite; the adapter is then the one before the update.
    """
    is_early = config.trains_early
    groups = [] if is_early else [await _complete(group) for group in coming]
    await _each(workers, lambda worker: worker.begin())
    if groups:
        shared = share(groups)
        await _each(workers, lambda worker: worker.feed(shared))
    size = config.group.per_iteration // config.learner.updates_per_iteration
    for epoch in range(config.learner.epochs):
        for first in range(0, len(coming), size):
            if is_early and epoch == 0:
                await _each(workers, lambda worker, at=first: _follow(worker, coming, first=at, stop=at + size))
            else:
                await _each(workers, lambda worker, at=first, turn=epoch: worker.train(at, size, epoch=turn))
            total = await _gradient(workers)
            await _each(workers, lambda worker, at=first, turn=epoch, g=total: worker.step(g, first=at, epoch=turn))
    findings = await _each(workers, lambda worker: worker.findings())
    finished = await _each(workers, lambda worker: worker.finish(findings))
    digests = [each.digest for each in finished]
    if len(set(digests)) > 1:
        raise ContractError(
            f"all learner workers must hold the same adapter after an update, got digests"
            f" {[digest[:12] for digest in digests]}: give them equal machines and library versions"
        )
    return finished[0].metrics


async def _follow(worker: Worker, coming: Sequence[Coming], *, first: int, stop: int) -> None:
    """Train a worker's shards of a mini-batch as its groups become complete, in their order."""
    while first < stop:
        await _complete(coming[first])
        groups = [group.result() for group in takewhile(lambda each: each.done(), coming[first:stop])]
        await worker.feed(GroupsHandle(groups))
        await worker.train(first, len(groups), epoch=0)
        first += len(groups)


async def _complete(group: Coming) -> ScoredGroup:
    """Wait for a group; a cancelled wait does not end the group's production."""
    await asyncio.wait({group})
    return group.result()


async def _gradient(workers: Sequence[Worker]) -> GradientHandle:
    """Add the workers' lane sums: the last levels of the tree of `learner.update.lanes`."""
    held = await _each(workers, lambda worker: worker.lane_sum())
    while len(held) > 1:
        half = len(held) // 2
        pairs: Iterable[Any] = zip(workers[:half], held[:half], held[half:], strict=True)
        held = await _together(worker.added(one, other) for worker, one, other in pairs)
    return held[0]


async def _each(workers: Sequence[Worker], call: Callable[[Worker], Awaitable[Any]]) -> list[Any]:
    return await _together(call(worker) for worker in workers)


async def _together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all calls; the first one that raises ends the wait."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
