"""Work ends with its result, its error, or the stop."""

import asyncio

import pytest

from learner.loop.stopping import unless_stopped


def test_work_that_a_stop_overtakes_is_cancelled():
    async def scene():
        stop, ended = asyncio.Event(), []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")

        asyncio.get_running_loop().call_later(0.05, stop.set)
        result = await unless_stopped(stop, work())
        await asyncio.sleep(0)
        return result, ended

    assert asyncio.run(scene()) == (None, ["cancelled"])


def test_an_error_of_the_work_comes_through():
    async def broken():
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        asyncio.run(unless_stopped(asyncio.Event(), broken()))


def test_work_that_ends_before_the_stop_gives_its_result():
    async def work() -> int:
        return 3

    async def scene() -> int | None:
        return await unless_stopped(asyncio.Event(), work())

    assert asyncio.run(scene()) == 3
