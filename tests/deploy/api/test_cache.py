"""The statuses that all clients of a server share."""

import asyncio

import pytest

from deploy.api.cache import StatusCache
from deploy.api.folder_source import FolderSource
from protocol.errors import BoardError
from protocol.status import RunStatus
from tests.support.runs.statuses import a_status


class Living(FolderSource):
    """A run that was heard of a moment ago whenever it is read, until its board is away."""

    def __init__(self) -> None:
        self.read, self.is_away = 0, False

    async def runs(self) -> list[RunStatus]:
        await asyncio.sleep(0)
        if self.is_away:
            raise BoardError("away")
        self.read += 1
        return [a_status("mine", iteration=self.read, updated=float(self.read), silent_s=0.3)]

    async def status(self, run: str) -> RunStatus | None:
        return (await self.runs())[0]


@pytest.mark.parametrize("ask", ["runs", "status"])
def test_of_two_requests_after_a_quiet_time_neither_calls_a_living_run_silent(ask: str) -> None:
    now = 0.0

    async def read(cache: StatusCache) -> RunStatus:
        return (await cache.runs())[0] if ask == "runs" else await cache.status("mine")

    async def scenario() -> tuple[list[RunStatus], RunStatus]:
        nonlocal now
        source = Living()
        cache = StatusCache(source, lambda: now)
        await read(cache)
        now = 60.0
        both = await asyncio.gather(read(cache), read(cache))
        source.is_away, now = True, 120.0
        return both, await read(cache)

    both, later = asyncio.run(scenario())
    assert [status.stale_since for status in both] == [None, None]
    assert later.stale_since is not None, "its board is away"
