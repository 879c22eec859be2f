"""How a run is stopped from outside: Ctrl-C, SIGTERM, `ray job stop`.

| signal     | what happens                                                                     | exit code |
|------------|----------------------------------------------------------------------------------|-----------|
| the first  | the update in progress ends, a checkpoint is written                             | 0         |
| after that | `cluster.stop_within_s` later the run ends with the checkpoint it has            | 0         |
| the second | the run ends at once; files are whole, since each appears by a rename            | 130       |

Work that a stop cuts off is repeated bit for bit when the run goes on, so each of the three costs only time.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal(say: Callable[[str], None], *, within_s: float) -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; enter this context in the task that is to be stopped.

    Args:
        say: shows a line to the person at the terminal.
        within_s: seconds after the first signal when the task is cancelled and the context ends without an exception.

    Raises:
        CancelledError: there was a second signal.
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
