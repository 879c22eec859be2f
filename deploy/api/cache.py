"""What the status API has lately read from its source: many clients cost one reading, and it outlives the board."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from deploy.api.problems import Problem
from deploy.api.source import Source
from protocol.errors import BoardError
from protocol.status import Pulse, RunStatus

FRESH_S = 0.5
"""Seconds for which one reading serves everybody."""
HELD = 256
"""Runs that are remembered."""


@dataclass
class _Read:
    status: RunStatus
    json: bytes
    read: float


class StatusCache:
    """Statuses of all runs and of each run, at most `FRESH_S` old while the board answers; made by the API."""

    def __init__(self, source: Source) -> None:
        """Read from `source` when asked."""
        self._source = source
        self._all: Sequence[RunStatus] | None = None
        self._all_read = 0.0
        self._first = asyncio.Lock()
        self._pulse = Pulse()
        self._each: dict[str, _Read] = {}

    async def runs(self) -> list[RunStatus]:
        """Return all runs, newest first (BoardError: the board is away and was never read)."""
        if self._all is None:
            async with self._first:  # many that ask at the start cost one reading
                if self._all is None:
                    self._all, self._all_read = await self._source.runs(), time.monotonic()
        elif (now := time.monotonic()) - self._all_read >= FRESH_S:
            self._all_read = now  # others get the list that is held while this one reads
            self._all = [status.model_copy(update={"silent_s": None}) for status in self._all]  # measured long ago
            with suppress(BoardError):
                self._all = await self._source.runs()
        return [self._pulse.marked(status) for status in self._all]

    async def status(self, run: str) -> RunStatus:
        """Return one run (Problem 404: no such run; BoardError: the board is away and the run was never read)."""
        return (await self._one(run)).status

    async def json(self, run: str) -> bytes:
        """Return the same as it goes over the wire."""
        return (await self._one(run)).json

    async def _one(self, run: str) -> _Read:
        held = self._each.get(run)
        now = time.monotonic()
        if held and now - held.read < FRESH_S:
            return held
        if held:
            held.read = now  # others get the status that is held while this one reads
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
