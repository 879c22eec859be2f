"""Pools that change their size while work goes on: nothing is lost, and a size that cannot be met waits visibly."""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import ray

from actors.pool import starts as starts_module
from actors.pool.calls import Member, answer
from actors.pool.pool import ActorPool
from actors.pool.starts import Starts
from protocol.errors import ContractError, PoolError
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.ray, pytest.mark.whole, pytest.mark.usefixtures("shared_ray")]

FEW = 2
"""Members that start at one time in tests of the order; a process of Ray takes seconds on two cores."""


@ray.remote(num_cpus=0)
class Slow:
    """Answers after a while; refuses to begin while `marker` exists."""

    def begin(self, marker: str = "") -> str:
        import os

        if marker and os.path.exists(marker):
            raise ContractError("the model is missing here")
        return "ready"

    def double(self, number: int, seconds: float = 0.0, gate: str = "") -> int:
        """Twice the number, after so many seconds and when the file `gate` is there."""
        import os

        time.sleep(seconds)
        end = time.monotonic() + 100
        while gate and not os.path.exists(gate) and time.monotonic() < end:
            time.sleep(0.01)
        return 2 * number


class Lonely:
    """A pool without members."""

    name, is_empty, has_failed = "lonely", True, False


class Nowhere:
    """An actor that never finds a node."""

    __ray_call__ = property(lambda self: self)

    def remote(self, *_: object) -> "Nowhere":
        return self

    def future(self) -> "Future[None]":
        return Future()


async def answered(_: object) -> None:
    """Ready at once."""


def make_pool(
    size: int, *, cpus: float = 0.0, marker: str = "", patience_s: float = 600.0, depth: int = 1
) -> ActorPool:
    return ActorPool(
        "slow",
        lambda _: Slow.options(num_cpus=cpus).remote(),
        size=size,
        max_restarts=0,
        prepare=lambda member: answer(member.handle.begin.remote(marker), timeout_s=60),
        patience_s=patience_s,
        depth=depth,
    )


def double(pool: ActorPool, number: int, seconds: float = 0.0, gate: Path | str = "") -> "asyncio.Task[int]":
    return asyncio.ensure_future(
        pool.call(lambda actor: answer(actor.double.remote(number, seconds, str(gate)), timeout_s=120))
    )


@pytest.mark.parametrize("depth", [1, 2])
async def test_work_in_progress_is_finished_while_the_pool_grows_and_shrinks(tmp_path, depth):
    pool = make_pool(1, depth=depth)
    await pool.start()
    calls = [double(pool, number, gate=tmp_path / "gate") for number in range(24)]
    pool.scale(3)
    await until(lambda: pool.status().busy == 3)
    assert pool.status().queue > 0
    pool.scale(1)
    assert pool.status().ready == 3, "a busy member finishes its calls before it leaves"
    (tmp_path / "gate").touch()
    answers = await asyncio.gather(*calls)
    await until(lambda: pool.status().ready == 1)
    status = pool.status()
    pool.stop()
    assert answers == [2 * number for number in range(24)]
    assert (status.desired, status.ready, status.restarts, status.queue) == (1, 1, 0, 0)


async def test_a_further_member_that_cannot_begin_costs_no_restart_and_joins_later(tmp_path, monkeypatch):
    monkeypatch.setattr(starts_module, "RETRY_S", (0.2, 0.5))
    marker = tmp_path / "missing"
    pool = make_pool(1, marker=str(marker))
    await pool.start()
    marker.touch()
    pool.scale(2)
    await until(lambda: pool.status().trouble != "")
    trouble = pool.status()
    marker.unlink()
    await until(lambda: pool.status().ready == 2)
    settled = pool.status()
    pool.stop()
    assert "the model is missing here" in trouble.trouble
    assert (trouble.ready, trouble.restarts) == (1, 0)
    assert (settled.ready, settled.restarts, settled.trouble) == (2, 0, "")


async def test_first_member_without_a_node_is_given_up_after_its_patience():
    pool = make_pool(1, cpus=64.0, patience_s=0.5)
    with pytest.raises(PoolError, match=r"no node had room for it within 0.5 s"):
        await pool.start()
    pool.stop()


async def test_actors_tell_where_they_are_and_what_they_did():
    pool = make_pool(2)
    await pool.start()
    began = time.monotonic()
    await asyncio.gather(*(double(pool, number, 0.05) for number in range(6)))
    took, actors = time.monotonic() - began, pool.actors()
    pool.stop()
    assert [actor.name for actor in actors] == ["slow-0", "slow-1"]
    assert sum(actor.calls for actor in actors) == 6
    assert len({actor.pid for actor in actors}) == 2
    assert all(actor.node and actor.last_seen and actor.state == "idle" for actor in actors)
    assert 6 * 0.05 <= pool.busy_s <= 2 * took, "of two members: a call that waits for one is no work"


async def test_a_pool_whose_cluster_is_too_small_begins_with_those_that_found_a_node():
    pool = make_pool(3, cpus=2.0, patience_s=15.0)  # two processes start within it, beside other work too
    await asyncio.wait_for(pool.start(), PATIENCE_S)
    begun = pool.status()
    answers = await asyncio.gather(*(double(pool, number) for number in range(4)))
    pool.scale(2)
    settled = pool.status()
    pool.stop()
    assert (begun.desired, begun.ready, begun.waiting, begun.restarts) == (3, 2, 1, 0)
    assert answers == [0, 2, 4, 6]
    assert (settled.desired, settled.ready, settled.waiting) == (2, 2, 0)


async def test_a_smaller_size_calls_off_further_members_before_those_that_the_pool_needs():
    members = [Member(slot) for slot in range(3)]
    starts = Starts(Lonely(), spawn=lambda _: Nowhere(), prepare=answered, patience_s=60.0)
    for member, is_needed in zip(members, (False, True, False), strict=True):
        starts.begin(member, is_needed=is_needed)
    kept = []
    for size in (2, 1):
        starts.resize([], size)
        kept.append([member.slot for member in starts.members])
    starts.stop()
    assert kept == [[0, 1], [1]]


async def test_a_size_far_beyond_the_cluster_starts_a_few_members_at_a_time_and_can_be_taken_back(monkeypatch):
    monkeypatch.setattr(starts_module, "JOINING", FEW)
    pool = make_pool(1, cpus=2.0)
    await pool.start()
    pool.scale(1024)
    await until(lambda: pool.status().ready == 2)
    unmet, actors = pool.status(), pool.actors()
    answered = await double(pool, 4)
    pool.scale(1)
    await until(lambda: pool.status().ready == 1)
    settled = pool.status()
    pool.stop()
    assert (unmet.desired, unmet.waiting, unmet.restarts) == (1024, 1022, 0)
    assert 2 <= len(actors) <= 2 + FEW and {actor.state for actor in actors[2:]} <= {"waiting", "starting"}
    assert answered == 8
    assert (settled.desired, settled.ready, settled.waiting) == (1, 1, 0)


async def test_the_next_in_line_starts_when_a_member_has_joined_and_the_last_in_line_leave_first(monkeypatch):
    monkeypatch.setattr(starts_module, "JOINING", FEW)
    gate, began = asyncio.Event(), []

    async def prepare(_: object) -> None:
        began.append(len(began))
        await gate.wait()

    pool = ActorPool("slow", lambda _: Slow.remote(), size=1, max_restarts=0, prepare=prepare)
    starting = asyncio.create_task(pool.start())
    await until(lambda: len(began) == 1)
    pool.scale(1 + 2 * FEW)
    await until(lambda: len(began) == 1 + FEW)
    pool.scale(2 + FEW)
    slots = [actor.name for actor in pool.actors()]
    gate.set()
    await starting
    await until(lambda: pool.status().ready == 2 + FEW)
    pool.stop()
    began = len(began)
    assert slots == [f"slow-{slot}" for slot in range(1 + FEW)]
    assert began == 2 + FEW
