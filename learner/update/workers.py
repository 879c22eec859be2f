"""One update by a group of learner workers: which worker does what, and in which order their gradients are added.

The workers never wait for each other: slices of gradients travel from worker to worker as handles, and the driver of
the update passes the handles on. So a worker that raises ends the update at once, and no worker waits for a dead one.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from learner.update.lanes import WHOLE, Gradient, exchanges_of
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.errors import ContractError
from protocol.messages import ScoredGroup
from protocol.ports import Metrics

P = ParamSpec("P")
Result = TypeVar("Result")
LearnerMethod = Callable[Concatenate[Learner, P], Result]
"""A method of `Learner`."""
PendingGroup = asyncio.Future[ScoredGroup]
"""A group that is complete or still being made."""


class Runner(Protocol):
    async def __call__(self, work: Callable[[], Result]) -> Result: ...


class Worker(Protocol):
    """The door to a `Learner`, in this process or another one. It takes one call at a time.

    await worker.call(Learner.train, 0, 4, epoch=0)
    slices = await worker.keep_each(8, Learner.lane_sum, Exchange(stride=1, members=8))
    await worker.call(Learner.step, *slices, first=0, epoch=0)
    """

    async def call(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Run a method of the learner and return its result."""
        ...

    async def keep(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Run a method of the learner; its result stays where it is.

        Returns:
            The result itself, or a reference to it. Only the arguments of other calls can hold it.
        """
        ...

    async def keep_each(
        self, count: int, work: LearnerMethod[P, Sequence[Result]], *args: P.args, **named: P.kwargs
    ) -> Sequence[Result]:
        """Run a method of the learner with `count` results; each of them stays where it is, apart from the others."""
        ...


async def at_once(work: Callable[[], Result]) -> Result:
    """Run the function now, in this thread."""
    return work()


class InProcessWorker:
    def __init__(self, learner: Learner, run: Runner = at_once) -> None:
        """
        Args:
            run: how to call it: `at_once`, or in a thread.
        """
        self._learner = learner
        self._run = run

    async def call(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        return await self._run(lambda: work(self._learner, *args, **named))

    async def keep(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        return await self.call(work, *args, **named)

    async def keep_each(
        self, count: int, work: LearnerMethod[P, Sequence[Result]], *args: P.args, **named: P.kwargs
    ) -> Sequence[Result]:
        results = await self.call(work, *args, **named)
        assert len(results) == count
        return results


async def update(
    config: RunConfig,
    workers: Sequence[Worker],
    pending: Sequence[PendingGroup],
    *,
    near: int = 1,
    share: Callable[[Sequence[ScoredGroup]], Sequence[ScoredGroup]] = lambda groups: groups,
) -> Metrics:
    """Learn from one iteration's groups in `epochs` passes of `updates_per_iteration` optimizer steps.

    If a group's scores alone give its credit, the first pass trains complete groups while later ones are still being
    made, and takes each optimizer step as soon as its groups are complete. The order of sums is the same.

    Args:
        workers: W workers, in the order of their seats; W divides `learner.lanes`.
        pending: the groups of the iteration, in order; complete or still being made.
        near: a divisor of W: workers c, c + W / near, c + 2W / near, ... are on one node, for every c.
        share: makes one reference to all groups for all workers, if they are complete before the update.

    Raises:
        ContractError: a group is incomplete or belongs to another iteration, or the workers' adapters differ
            afterwards.
        NonFiniteError: a loss or a gradient is not finite; the adapter is then the one before the update.
    """
    is_early = config.trains_early
    groups = [] if is_early else [await _complete(group) for group in pending]
    await _all(workers, Learner.begin)
    if groups:
        await _all(workers, Learner.feed, share(groups))
    size = config.group.per_iteration // config.learner.updates_per_iteration
    adding_s = 0.0
    for epoch in range(config.learner.epochs):
        for first in range(0, len(pending), size):
            if is_early and epoch == 0:
                await _together(_follow(worker, pending, first=first, stop=first + size) for worker in workers)
            else:
                await _all(workers, Learner.train, first, size, epoch=epoch)
            began = time.monotonic()
            slices = await gradient_slices(workers, near)
            adding_s += time.monotonic() - began
            await _all(workers, Learner.step, *slices, first=first, epoch=epoch)
            del slices  # frees the object store before the next sums
    findings = await _together(worker.keep(Learner.findings) for worker in workers)
    finished = await _all(workers, Learner.finish, *findings)
    digests = [each.digest for each in finished]
    if len(set(digests)) > 1:
        raise ContractError(
            f"all learner workers must hold the same adapter after an update, got digests"
            f" {[digest[:12] for digest in digests]}: give them equal machines and library versions"
        )
    return {**finished[0].metrics, "update/reduction_seconds": adding_s}


async def _follow(worker: Worker, pending: Sequence[PendingGroup], *, first: int, stop: int) -> None:
    """Train a worker's shards of a mini-batch as its groups become complete, in their order."""
    while first < stop:
        await _complete(pending[first])
        groups = [group.result() for group in itertools.takewhile(lambda each: each.done(), pending[first:stop])]
        await worker.call(Learner.feed, groups)
        await worker.call(Learner.train, first, len(groups), epoch=0)
        first += len(groups)


async def _complete(group: PendingGroup) -> ScoredGroup:
    """Wait for a group; a cancelled wait does not end the group's production."""
    await asyncio.wait({group})
    return group.result()


async def gradient_slices(workers: Sequence[Worker], near: int) -> Sequence[Gradient]:
    """Add the workers' lane sums in the tree of `learner.update.lanes`.

    Returns:
        The slices of the sum of all lanes; each worker added one.
    """
    exchanges = [*exchanges_of(len(workers), near), WHOLE]
    cut = exchanges[0]
    slices = await _together(worker.keep_each(cut.members, Learner.lane_sum, cut) for worker in workers)
    for exchange, cut in itertools.pairwise(exchanges):
        # A worker gets its own slice from each worker of its group, and cuts the sum for the next exchange.
        slices = await _together(
            worker.keep_each(
                cut.members,
                Learner.added,
                *(slices[other][exchange.index(seat)] for other in exchange.group(seat)),
                cut=cut,
            )
            for seat, worker in enumerate(workers)
        )
    return [whole for (whole,) in slices]


async def _all(
    workers: Sequence[Worker], work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs
) -> list[Result]:
    """Call a method of every worker's learner."""
    return await _together(worker.call(work, *args, **named) for worker in workers)


async def _together(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Wait for all calls; the first one that raises ends the wait."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
