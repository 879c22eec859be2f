"""Signals: the first ends a run in order, a deadline ends it in any case, the second ends it at once."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from deploy.run.signals import stop_on_signal


@pytest.fixture(autouse=True)
def _terminal() -> Iterator[None]:
    """The tests may themselves have been started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["stop", "closed terminal"])
def test_the_first_signal_sets_the_event_and_leaves_the_work_alone(number):
    async def scene():
        said = []
        with stop_on_signal(said.append, within_s=30) as stop:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop.wait(), 60)
            await asyncio.sleep(0.05)
        return said

    assert asyncio.run(scene()) == ["stopping with a checkpoint; a second signal stops at once"]


def test_work_that_does_not_end_in_time_is_left_and_the_run_ends_in_order():
    async def scene():
        said = []
        with stop_on_signal(said.append, within_s=0.1):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return said

    said = asyncio.run(asyncio.wait_for(scene(), 50))
    assert "did not end within 0.1 s and was abandoned" in said[1]


def test_a_stop_without_a_signal_has_the_same_deadline():
    """A command through the board sets the event."""

    async def scene():
        said = []
        with stop_on_signal(said.append, within_s=0.1) as stop:
            stop.set()
            await asyncio.sleep(60)
        return said

    (said,) = asyncio.run(asyncio.wait_for(scene(), 50))
    assert "did not end within 0.1 s and was abandoned" in said


def test_the_second_signal_ends_at_once():
    async def scene():
        with stop_on_signal(lambda text: None, within_s=30):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())


def test_a_terminal_that_closes_for_shell_and_system_stops_a_run_with_a_checkpoint():
    async def scene():
        said = []
        with stop_on_signal(said.append, within_s=30) as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0.05)
            return stop.is_set(), said

    assert asyncio.run(scene()) == (True, ["stopping with a checkpoint; a second signal stops at once"])
    os.kill(os.getpid(), signal.SIGHUP)  # the last of them may come late


def test_a_closed_terminal_stops_no_run_that_was_started_with_nohup():
    async def scene():
        with stop_on_signal(lambda text: None, within_s=30) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            return stop.is_set()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert not asyncio.run(scene())
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
