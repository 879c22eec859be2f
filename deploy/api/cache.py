"""A short memory between the API and its source: many clients cost one look, and what was seen outlives the board."""

import time
from dataclasses import dataclass

from deploy.api.problems import Problem
from deploy.api.source import Source
from protocol.errors import BoardError
from protocol.status import RunStatus, staleness_of

FRESH_S = 0.5
"""Seconds for which one look serves everybody."""
HELD = 256
"""Runs that are remembered."""


@dataclass
class _Seen:
    status: RunStatus
    json: bytes
    looked: float


class Glance:
    """Made by the API over its source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seen: dict[str, _Seen] = {}

    async def runs(self) -> list[RunStatus]:
        """All runs, newest first."""
        return [_marked(status) for status in await self._source.runs()]

    async def status(self, run: str) -> RunStatus:
        """One run (Problem 404: no such run; BoardError: the board is away and the run was never seen)."""
        return (await self._look(run)).status

    async def json(self, run: str) -> bytes:
        """The same as it goes over the wire."""
        return (await self._look(run)).json

    async def _look(self, run: str) -> _Seen:
        seen = self._seen.get(run)
        now = time.monotonic()
        if seen and now - seen.looked < FRESH_S:
            return seen
        if seen:
            seen.looked = now  # others are served what is held while this one looks
        try:
            status = await self._source.status(run)
        except BoardError:
            if seen is None:
                raise
            status = seen.status
        if status is None:
            self._seen.pop(run, None)
            raise Problem(404, "no such run")
        marked = _marked(status)
        if seen is None or marked != seen.status:
            seen = _Seen(marked, marked.model_dump_json().encode(), now)
        while len(self._seen) >= HELD and run not in self._seen:
            self._seen.pop(next(iter(self._seen)))
        self._seen[run] = seen
        return seen


def _marked(status: RunStatus) -> RunStatus:
    return status.model_copy(update={"stale_since": staleness_of(status, now=time.time())})
