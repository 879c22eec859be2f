"""The newest statuses that the API has read: many clients share one reading, and the cache outlives the board."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from deploy.api.problems import Problem
from deploy.api.source import Source
from deploy.monitor.health import DatedStatus
from protocol.errors import BoardError, DamagedError
from protocol.status import RunStatus

FRESH_S = 0.5
"""Seconds for which one reading serves all clients."""
HELD = 256
"""Largest number of runs that are kept because a client asked for one."""


@dataclass(frozen=True)
class _Look:
    ended: float
    error: BoardError | None


class StatusCache:
    """Statuses of all runs and of each run, at most `FRESH_S` old while the board answers.

    Of a run's two readings, alone and in the list, the newest counts.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        """Read from `source` on demand; `clock` is in seconds."""
        self._source = source
        self._clock = clock
        self._listed: dict[str, DatedStatus] | None = None
        self._list_read = 0.0
        self._alone: dict[str, DatedStatus] = {}
        self._looks: dict[str | None, _Look] = {}
        self._looking: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
        self._texts: dict[str, tuple[RunStatus, bytes]] = {}

    async def runs(self) -> list[RunStatus]:
        """Return all runs, newest first (BoardError: the board is away and was never read)."""
        error = await self._look(None, self._read_list)
        if self._listed is None:
            assert error is not None
            raise error
        newest = (self._newest(run) or reading for run, reading in self._listed.items())
        return [reading.at(self._clock(), is_board_away=error is not None) for reading in newest]

    @property
    def list_age_s(self) -> int:
        """Return the whole seconds since the list of runs was read."""
        return int(self._clock() - self._list_read)

    async def status(self, run: str, *, must_answer: bool = False) -> RunStatus:
        """Return one run.

        Args:
            must_answer: do not take an earlier reading if the board is away.

        Raises:
            Problem: 404, no such run.
            DamagedError: its status on the board cannot be read.
            BoardError: the board is away and no earlier reading counts.
        """
        error = await self._look(run, lambda: self._read_one(run))
        reading = self._newest(run)
        if error and (reading is None or must_answer or isinstance(error, DamagedError)):
            raise error
        if reading is None:
            raise Problem(404, "no such run")
        return reading.at(self._clock(), is_board_away=error is not None)

    async def json(self, run: str) -> bytes:
        status, held = await self.status(run), self._texts.get(run)
        if held is None or held[0] != status:
            held = self._texts[run] = status, status.model_dump_json().encode()  # for all clients
        return held[1]

    async def _look(self, what: str | None, read: Callable[[], Awaitable[None]]) -> BoardError | None:
        """Read unless another client has just done so; requests that come at the same time share one reading.

        Returns:
            Why the newest look failed; None if it did not.
        """
        lock = self._looking.setdefault(what, asyncio.Lock())
        async with lock:
            look = self._looks.get(what)
            if look is None or self._clock() - look.ended >= FRESH_S:
                error = None
                try:
                    await read()
                except BoardError as raised:
                    error = raised
                look = self._looks[what] = _Look(self._clock(), error)
                while len(self._looks) > HELD:
                    del self._looks[next(iter(self._looks))]
            return look.error

    async def _read_list(self) -> None:
        began = self._clock()
        statuses = await self._source.runs()
        self._listed = {status.run: DatedStatus.of(status, began, self._newest(status.run)) for status in statuses}
        self._list_read = began

    async def _read_one(self, run: str) -> None:
        began = self._clock()
        status = await self._source.status(run)
        if status is None:
            for held in (self._alone, self._texts, self._listed or {}):
                held.pop(run, None)
            return
        reading = DatedStatus.of(status, began, self._newest(run))
        while len(self._alone) >= HELD and run not in self._alone:
            oldest = next(iter(self._alone))
            for held in (self._alone, self._texts, self._looks):
                held.pop(oldest, None)
        self._alone[run] = reading

    def _newest(self, run: str) -> DatedStatus | None:
        found = [held[run] for held in (self._alone, self._listed or {}) if run in held]
        return max(found, key=lambda reading: reading.read, default=None)
