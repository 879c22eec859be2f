"""Groups in order of age with bounded staleness, and a bound on the images that are in progress.

A group takes a slot when it is admitted and keeps it until the update that used it is published. So no group is
rolled out more than `slots / per_iteration - 1` updates before its use. Taking groups in the order of their admission
keeps that bound exactly.

| waits               | for                                     | at most until                                   |
|---------------------|-----------------------------------------|-------------------------------------------------|
| `GroupStream.take`  | the oldest groups                       | their production ends, which has deadlines      |
| `settled`           | all groups in flight                    | the same                                        |
| `ImageBudget.room`  | scores of the images in progress        | the deadlines of rollouts and rewards           |
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from protocol.messages import ScoredGroup

Produce = Callable[[int], Awaitable[ScoredGroup]]
"""Rolls out and scores the group with this index, counted from the start of the run."""


class GroupStream:
    """Keeps `slots` groups in production, from index `start` up to `end`.

    async with GroupStream(produce, slots=12, start=0, end=1200) as groups:
        batch = await groups.take(12)
        ...                                # learn, publish
        groups.release(12)                 # only now: a group admitted earlier would be too stale
    """

    def __init__(self, produce: Produce, *, slots: int, start: int, end: int) -> None:
        """
        Args:
            produce: called once for every index, in order.
            slots: groups that may be in production, or scored and not yet released.
            start: index of the first group.
            end: index after the last group.
        """
        self._produce = produce
        self._slots = slots
        self._next = start
        self._end = end
        self._in_flight: deque[asyncio.Task[ScoredGroup]] = deque()
        self._worked = 0.0

    async def __aenter__(self) -> "GroupStream":
        self.release(self._slots)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._in_flight.clear()

    @property
    def in_work(self) -> int:
        """Groups that are being rolled out or scored."""
        return len(self._in_flight) - self.scored

    @property
    def scored(self) -> int:
        """Scored groups that the loop has not taken yet."""
        return sum(task.done() for task in self._in_flight)

    @property
    def worked_until(self) -> float:
        """When the last production ended, by `time.monotonic`; now, if a group is in work."""
        return time.monotonic() if self.in_work else self._worked

    async def settled(self) -> None:
        """Wait until no group is in work; the error of a failed one is left to `take`."""
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    def oldest(self, count: int) -> list["asyncio.Future[ScoredGroup]"]:
        """Return the `count` oldest groups, complete or still being made; `take` waits for the same groups."""
        return [self._in_flight[index] for index in range(count)]

    async def take(self, count: int) -> list[ScoredGroup]:
        """Wait for the `count` oldest groups. The first failed one ends the stream with its error."""
        oldest = self.oldest(count)
        batch = list(await asyncio.gather(*oldest))
        for _ in oldest:
            self._in_flight.popleft()
        return batch

    def release(self, count: int) -> None:
        """Free `count` slots and admit as many further groups."""
        admitted = range(self._next, min(self._next + count, self._end))
        self._in_flight.extend(asyncio.create_task(self._make(index)) for index in admitted)
        self._next += len(admitted)

    async def _make(self, index: int) -> ScoredGroup:
        try:
            return await self._produce(index)
        finally:
            self._worked = time.monotonic()


class ImageBudget:
    """Back-pressure: bounds the images that wait for their scores, besides the images that are being rolled out.

    budget = ImageBudget(4096, parallel=lambda: 8)
    async with budget.room(44):
        ...                                # request a shard of 44 images, score it
    """

    def __init__(self, limit: int, *, parallel: Callable[[], int]) -> None:
        """
        Args:
            limit: images that may wait for their scores.
            parallel: returns how many shards the rollout actors can hold now; the number may change during a run.
        """
        self.images = 0
        """Images of all shards that were requested and are not yet scored."""
        self._limit = limit
        self._parallel = parallel
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def room(self, images: int) -> AsyncIterator[None]:
        """Enter when `images` more fit, first come, first served; a shard larger than the limit enters alone."""
        async with self._turn:
            while self.images and self.images + images > self._limit + images * self._parallel():
                self._changed.clear()
                await self._changed.wait()
            self.images += images
        try:
            yield
        finally:
            self.images -= images
            self._changed.set()
