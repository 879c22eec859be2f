"""The newest statuses that the API has read: many clients share one reading, and the cache outlives the board."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.api.problems import Problem
from deploy.api.source import Source
from deploy.monitor.health import Pulse
from protocol.errors import BoardError
from protocol.status import RunStatus

FRESH_S = 0.5
"""Seconds for which one reading serves all clients."""
HELD = 256
"""Largest number of runs in the cache."""


@dataclass
class _Read:
    status: RunStatus
    json: bytes
    read: float


class StatusCache:
    """Statuses of all runs and of each run, at most `FRESH_S` old while the board answers."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        """Read from `source` on demand; `clock` is in seconds."""
        self._source = source
        self._clock = clock
        self._all: Sequence[RunStatus] | None = None
        self._all_read = 0.0
        self._first = asyncio.Lock()
        self._pulse = Pulse(clock)
        self._each: dict[str, _Read] = {}

    async def runs(self) -> list[RunStatus]:
        """Return all runs, newest first (BoardError: the board is away and was never read)."""
        if self._all is None:
            async with self._first:  # requests that come at the same time share one reading
                if self._all is None:
                    self._all, self._all_read = await self._source.runs(), self._clock()
        elif (now := self._clock()) - self._all_read >= FRESH_S:
            self._all_read = now  # other requests get the cached list while this one reads
            try:
                self._all = await self._source.runs()
            except BoardError:  # how long each has been silent is out of date
                self._all = [status.model_copy(update={"silent_s": None}) for status in self._all]
        return [self._pulse.marked(status) for status in self._all]

    async def status(self, run: str) -> RunStatus:
        """Return one run (Problem 404: no such run; BoardError: the board is away and the run was never read)."""
        return (await self._one(run)).status

    async def json(self, run: str) -> bytes:
        """Return the same as JSON."""
        return (await self._one(run)).json

    async def _one(self, run: str) -> _Read:
        held = self._each.get(run)
        now = self._clock()
        if held and now - held.read < FRESH_S:
            return held
        if held:
            held.read = now  # other requests get the cached status while this one reads
        try:
            status = await self._source.status(run)
        except BoardError:
            if held is None:
                raise
            status = held.status.model_copy(update={"stale_since": None})
        if status is None:
            self._each.pop(run, None)
            raise Problem(404, "no such run")
        marked = self._pulse.marked(status)
        if held is None or marked != held.status:
            held = _Read(marked, marked.model_dump_json().encode(), now)
        while len(self._each) >= HELD and run not in self._each:
            self._each.pop(next(iter(self._each)))
        self._each[run] = held
        return held
