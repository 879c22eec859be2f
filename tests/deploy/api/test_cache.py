"""The statuses that all clients of a server share: a reading has its age, whoever asks for what, in any order."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.cache import FRESH_S, StatusCache
from deploy.api.folder_source import FolderSource
from deploy.api.problems import Problem
from deploy.api.prometheus import exposition
from protocol.errors import BoardError, DamagedError
from protocol.status import RunStatus
from tests.support.runs.statuses import a_status

LONGEST_S = 5.0
"""A run with a heartbeat of a second is silent after so long."""


class World(FolderSource):
    """Runs `a`, whose silence the board measures, and `b`, whose silence readers see; time passes as a test says."""

    def __init__(self) -> None:
        self.now, self.is_away = 0.0, False
        self.heard = {"a": 0.0, "b": 0.0}
        self.damaged: set[str] = set()

    async def runs(self) -> list[RunStatus]:
        return [await self._read(run) for run in self.heard if run not in self.damaged]

    async def status(self, run: str) -> RunStatus | None:
        return await self._read(run) if run in self.heard else None

    async def _read(self, run: str) -> RunStatus:
        await asyncio.sleep(0)
        if self.is_away:
            raise BoardError("away")
        if run in self.damaged:
            raise DamagedError(f"the status of run {run} on the board cannot be read")
        silent_s = self.now - self.heard[run] if run == "a" else None
        return a_status(run, updated=self.heard[run], silent_s=silent_s)


@dataclass
class Known:
    """What a reader may know of a run after its newest reading."""

    updated: float
    heard: float


STEPS = st.lists(
    st.tuples(
        st.floats(FRESH_S + 0.1, 4 * LONGEST_S),
        st.sampled_from(["list", "list", "one a", "one b", "json a", "beat a", "beat b", "away", "back"]),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(steps=STEPS)
def test_silence_is_told_by_the_newest_reading_whoever_polls_what(steps: list[tuple[float, str]]) -> None:
    async def scenario() -> None:
        world = World()
        cache = StatusCache(world, lambda: world.now)
        known: dict[str, Known] = {}
        is_listed, list_read = False, 0.0

        def read(run: str) -> None:
            """What any successful reading of a run tells."""
            updated, before = world.heard[run], known.get(run)
            is_changed = before is None or before.updated != updated
            known[run] = Known(updated, updated if run == "a" else world.now if is_changed else before.heard)

        def expect(status: RunStatus) -> None:
            is_silent = world.now - known[status.run].heard > LONGEST_S
            assert (status.stale_since is not None) == is_silent
            assert status.updated == known[status.run].updated, "the newest reading"
            if is_silent:
                assert ("the board does not answer" in status.health) == world.is_away

        for seconds, step in steps:
            world.now += seconds
            action, _, run = step.partition(" ")
            if action == "beat":
                world.heard[run] = world.now
            elif action in ("away", "back"):
                world.is_away = action == "away"
            elif action == "list":
                if not world.is_away:
                    is_listed, list_read = True, world.now
                    for each in world.heard:
                        read(each)
                if not is_listed:
                    with pytest.raises(BoardError):
                        await cache.runs()
                    continue
                found = await cache.runs()
                assert [status.run for status in found] == ["a", "b"]
                assert cache.list_age_s == int(world.now - list_read)
                scraped = exposition(found).decode()
                for status in found:
                    expect(status)
                    stale = float(status.stale_since is not None)
                    assert f'flowcredit_stale{{run="{status.run}"}} {stale}' in scraped
            else:
                if not world.is_away:
                    read(run)
                if run not in known:
                    with pytest.raises(BoardError):
                        await cache.status(run)
                    continue
                status = await cache.status(run)
                if action == "json":
                    assert RunStatus.model_validate_json(await cache.json(run)) == status
                expect(status)

    asyncio.run(scenario())


@pytest.mark.parametrize("ask", ["runs", "status"])
async def test_of_requests_after_a_quiet_time_none_is_answered_with_the_last_time_s_reading(ask: str) -> None:
    world = World()
    cache = StatusCache(world, lambda: world.now)

    async def read() -> RunStatus:
        return (await cache.runs())[0] if ask == "runs" else await cache.status("a")

    await read()
    world.now = world.heard["a"] = 1080.0
    found = await asyncio.gather(read(), read(), read())
    assert [(status.stale_since, status.updated) for status in found] == [(None, 1080.0)] * 3


async def test_one_silence_has_one_beginning() -> None:
    world = World()
    cache = StatusCache(world, lambda: world.now)
    seen = set()
    for second in range(10, 16):
        world.now = second + 0.01 * (second % 3)
        seen |= {(await cache.status("a")).stale_since, (await cache.runs())[0].stale_since}
    assert len(seen) == 1


async def test_a_board_that_is_away_and_a_value_that_cannot_be_read_are_told_from_a_silent_run() -> None:
    world = World()
    cache = StatusCache(world, lambda: world.now)
    await cache.status("a", must_answer=True)
    world.is_away, world.now = True, 60.0
    assert (await cache.status("a")).stale_since is not None
    with pytest.raises(BoardError, match="away"):
        await cache.status("a", must_answer=True)
    world.is_away, world.damaged, world.now = False, {"a"}, 61.0
    with pytest.raises(DamagedError, match="run a on the board cannot be read"):
        await cache.status("a")
    with pytest.raises(Problem, match="no such run"):
        await cache.status("c")
