"""Signals: the first ends a run in order, a deadline ends it in any case, the second ends it at once."""

import asyncio
import os
import signal

import pytest

from deploy.run.signals import finished_before, stop_on_signal


def test_the_first_signal_sets_the_event_and_leaves_the_work_alone():
    async def scene():
        said = []
        with stop_on_signal(said.append, within_s=30) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 5)
            await asyncio.sleep(0.05)
        return said

    assert asyncio.run(scene()) == ["stopping with a checkpoint; once more stops at once"]


def test_work_that_does_not_end_in_time_is_left_and_the_run_ends_in_order():
    async def scene():
        said = []
        with stop_on_signal(said.append, within_s=0.1):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return said

    said = asyncio.run(asyncio.wait_for(scene(), 10))
    assert "did not end within 0.1 s and is left" in said[1]


def test_the_second_signal_ends_at_once():
    async def scene():
        with stop_on_signal(lambda text: None, within_s=30):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())


def test_work_that_a_stop_overtakes_is_cancelled():
    async def scene():
        stop, ended = asyncio.Event(), []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")

        asyncio.get_running_loop().call_later(0.05, stop.set)
        is_done = await finished_before(stop, work())
        await asyncio.sleep(0)
        return is_done, ended

    assert asyncio.run(scene()) == (False, ["cancelled"])


def test_an_error_of_the_work_comes_through():
    async def broken():
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        asyncio.run(finished_before(asyncio.Event(), broken()))
