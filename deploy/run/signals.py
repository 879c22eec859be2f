"""How a run is stopped from outside: Ctrl-C, SIGTERM, `ray job stop`.

| signal     | what happens                                                                     | exit code |
|------------|----------------------------------------------------------------------------------|-----------|
| the first  | the update in progress ends, a checkpoint is written                             | 0         |
| after that | `cluster.stop_within_s` later the run ends with the checkpoint it has            | 0         |
| the second | the run ends at once; files are whole, since each appears by a rename            | 130       |

What a stop leaves out is repeated bit for bit when the run goes on, so none of the three loses anything but time.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ROUNDS = 5
"""Seconds, and tries, in which tasks must end that were cancelled."""


@contextmanager
def stop_on_signal(say: Callable[[str], None], *, within_s: float) -> Iterator[asyncio.Event]:
    """An event that the first signal sets. Ends quietly when the stop took too long, with CancelledError on the second.

    To be entered in the task that is to be stopped.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    deadline: list[asyncio.TimerHandle] = []
    is_overdue = False

    def on_deadline() -> None:
        nonlocal is_overdue
        is_overdue = True
        say(
            f"the update in progress did not end within {within_s:g} s and is left; it is repeated when the run goes on"
        )
        task.cancel()

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
            return
        say("stopping with a checkpoint; once more stops at once")
        deadline.append(loop.call_later(within_s, on_deadline))
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    except asyncio.CancelledError:
        if not is_overdue:
            raise
        task.uncancel()
    finally:
        for timer in deadline:
            timer.cancel()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def finished_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work; False when `stop` is set first, and the work is then cancelled."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        stopping.cancel()


async def end_all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Cancel tasks until they have ended; one that does not in `ROUNDS` rounds of a second is left.

    Once is not enough: `asyncio.wait_for` of Python 3.11, with which redis-py writes, answers a cancellation that
    comes together with its result by that result.
    """
    left = set(tasks)
    for _ in range(ROUNDS):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=1.0)
    if left:
        log.warning("%d tasks beside the run do not end and are left", len(left))
