"""Oldest-first groups with bounded staleness: what is drawn ahead, and when the next one may start.

A group takes a slot when it is admitted and keeps it until the update that used it is published. So no group is
drawn more than `slots / per-iteration` - 1 updates before its use; taking groups in the order of their admission
keeps that bound exactly. Whoever awaits `take` is woken by the group's own production, which ends within the
deadlines of the rollout and reward sources.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType

from protocol.messages import ScoredGroup

Produce = Callable[[int], Awaitable[ScoredGroup]]
"""Draw and score the group at this place of the run's sequence."""


class GroupStream:
    """Keeps `slots` groups in production, from place `start` up to `end`.

    async with GroupStream(produce, slots=12, start=0, end=1200) as groups:
        batch = await groups.take(12)
        ...                                # learn, publish
        groups.release(12)                 # only now: a slot freed earlier would be born stale
    """

    def __init__(self, produce: Produce, *, slots: int, start: int, end: int) -> None:
        self._produce = produce
        self._slots = slots
        self._next = start
        self._end = end
        self._in_flight: deque[asyncio.Task[ScoredGroup]] = deque()

    async def __aenter__(self) -> "GroupStream":
        self.release(self._slots)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._in_flight.clear()

    @property
    def in_work(self) -> int:
        """Groups that are being drawn and scored."""
        return len(self._in_flight) - self.scored

    @property
    def scored(self) -> int:
        """Scored groups that nobody has taken yet."""
        return sum(task.done() for task in self._in_flight)

    async def take(self, count: int) -> list[ScoredGroup]:
        """The `count` oldest groups in their order. The first failed one ends the stream with its error."""
        oldest = [self._in_flight[place] for place in range(count)]
        batch = list(await asyncio.gather(*oldest))
        for _ in oldest:
            self._in_flight.popleft()
        return batch

    def release(self, count: int) -> None:
        """Admit as many further groups as slots have become free."""
        for _ in range(count):
            if self._next < self._end:
                self._in_flight.append(asyncio.ensure_future(self._produce(self._next)))
                self._next += 1
