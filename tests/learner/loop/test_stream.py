"""Groups come oldest first, never staler than allowed, and a failed one is not lost."""

import asyncio

import numpy as np
import pytest

from learner.loop.stream import GroupStream
from protocol.errors import PoolError
from protocol.messages import Prompt, ScoredGroup


def group(index: int) -> ScoredGroup:
    return ScoredGroup(prompt=Prompt(index=index, text=str(index)), shards=())


async def test_groups_come_in_the_order_of_admission_whichever_finishes_first() -> None:
    async def produce(index: int) -> ScoredGroup:
        await asyncio.sleep(0.02 - 0.002 * index)
        finished.append(index)
        return group(index)

    finished: list[int] = []
    async with GroupStream(produce, slots=8, start=0, end=8) as groups:
        assert [each.prompt.index for each in await groups.take(4)] == [0, 1, 2, 3]
        assert [each.prompt.index for each in await groups.take(4)] == [4, 5, 6, 7]
    assert finished != sorted(finished)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_the_staleness_bound_holds_exactly(max_lag: int) -> None:
    """A group's lag is the number of updates between its admission and its use; the worst one is max_lag itself."""
    per_iteration, iterations = 3, 40
    version, lags = 0, []
    jitter = np.random.default_rng(0).uniform(0, 0.002, per_iteration * iterations)

    async def produce(index: int) -> ScoredGroup:
        drawn_with[index] = version
        await asyncio.sleep(jitter[index])
        return group(index)

    drawn_with: dict[int, int] = {}
    slots = per_iteration * (max_lag + 1)
    async with GroupStream(produce, slots=slots, start=0, end=per_iteration * iterations) as groups:
        for _ in range(iterations):
            batch = await groups.take(per_iteration)
            lags.extend(version - drawn_with[each.prompt.index] for each in batch)
            version += 1
            groups.release(per_iteration)
    assert len(lags) == per_iteration * iterations
    assert max(lags) == max_lag


async def test_nothing_is_admitted_before_its_slot_is_free_nor_beyond_the_end() -> None:
    admitted: list[int] = []

    async def produce(index: int) -> ScoredGroup:
        admitted.append(index)
        return group(index)

    async with GroupStream(produce, slots=4, start=10, end=15) as groups:
        await groups.take(2)
        await asyncio.sleep(0.01)
        assert admitted == [10, 11, 12, 13]
        groups.release(2)
        await asyncio.sleep(0.01)
        assert admitted == [10, 11, 12, 13, 14]
    admitted.clear()
    async with GroupStream(produce, slots=10**12, start=10, end=12) as groups:
        await groups.take(2)
        assert admitted == [10, 11]


async def test_the_failure_of_one_group_surfaces_and_the_others_are_cancelled() -> None:
    cancelled: list[int] = []

    async def produce(index: int) -> ScoredGroup:
        if index == 1:
            raise PoolError("no rollout actor is left")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(index)
            raise
        return group(index)

    with pytest.raises(PoolError, match="no rollout actor is left"):
        async with GroupStream(produce, slots=6, start=0, end=6) as groups:
            await groups.take(3)
    assert sorted(cancelled) == [0, 2, 3, 4, 5]


async def test_a_failure_ahead_of_its_turn_waits_for_its_turn() -> None:
    async def produce(index: int) -> ScoredGroup:
        if index == 3:
            raise PoolError("late")
        return group(index)

    async with GroupStream(produce, slots=4, start=0, end=4) as groups:
        assert len(await groups.take(2)) == 2
        with pytest.raises(PoolError, match="late"):
            await groups.take(2)


async def test_groups_in_work_and_scored_ones_are_counted() -> None:
    gates = [asyncio.Event() for _ in range(4)]

    async def produce(index: int) -> ScoredGroup:
        await gates[index].wait()
        return group(index)

    async with GroupStream(produce, slots=3, start=0, end=4) as groups:
        assert (groups.in_work, groups.scored) == (3, 0)
        gates[1].set()
        await asyncio.sleep(0.01)
        assert (groups.in_work, groups.scored) == (2, 1)
        gates[0].set()
        await groups.take(2)
        assert (groups.in_work, groups.scored) == (1, 0)
        groups.release(1)
        assert (groups.in_work, groups.scored) == (2, 0)
    assert (groups.in_work, groups.scored) == (0, 0)
