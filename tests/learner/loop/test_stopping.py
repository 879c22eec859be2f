"""Work ends with its result, its error, or the stop."""

import asyncio

import pytest

from learner.loop.stopping import unless_stopped


async def test_work_that_a_stop_overtakes_is_cancelled():
    stop, ended = asyncio.Event(), []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    asyncio.get_running_loop().call_later(0.05, stop.set)
    result = await unless_stopped(stop, work())
    await asyncio.sleep(0)
    assert (result, ended) == (None, ["cancelled"])


def test_an_error_of_the_work_comes_through():
    async def broken():
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        asyncio.run(unless_stopped(asyncio.Event(), broken()))


async def test_work_that_ends_before_the_stop_gives_its_result():
    async def work() -> int:
        return 3

    assert await unless_stopped(asyncio.Event(), work()) == 3
