"""How a run is stopped from outside: Ctrl-C, SIGTERM, `ray job stop`.

| signal     | what happens                                                                     | exit code |
|------------|----------------------------------------------------------------------------------|-----------|
| the first  | the update in progress ends, a checkpoint is written                             | 0         |
| after that | `cluster.stop_within_s` later the run ends with the checkpoint it has            | 0         |
| the second | the run ends at once; files are whole, since each appears by a rename            | 130       |

Work that a stop cuts off is repeated bit for bit when the run goes on, so each of the three costs only time.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Hear = Callable[[], object]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Result = TypeVar("Result")


def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, also where an event loop runs already, as in a notebook.

    There it gets a thread of its own, which hears no signals; an interrupt of this thread cancels the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def noted() -> Result:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="run") as thread:
        done = thread.submit(asyncio.run, noted())
        try:
            return done.result()
        except KeyboardInterrupt:
            loop, task = started.result()
            loop.call_soon_threadsafe(task.cancel)
            raise


class StopRequest:
    """Stops a run of another thread as signals do: asked once in order, asked twice at once."""

    def __init__(self) -> None:
        """Nothing is asked yet, and nobody hears."""
        self._lock = threading.Lock()
        self._asked = 0
        self._hear: Hear | None = None

    def ask(self) -> None:
        """Ask; a run that has not begun hears it when it begins."""
        with self._lock:
            self._asked += 1
            if self._hear:
                self._hear()

    @contextmanager
    def heard_by(self, hear: Hear) -> Iterator[None]:
        """Call `hear`, in the thread that asks, for each time that somebody asked or asks."""
        with self._lock:
            for _ in range(self._asked):
                hear()
            self._hear = hear
        try:
            yield
        finally:
            with self._lock:
                self._hear = None


@contextmanager
def stop_on_signal(
    say: Callable[[str], None], *, within_s: float, request: StopRequest | None = None
) -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; enter this context in the task that is to be stopped.

    Args:
        say: shows a line to the person at the terminal.
        within_s: seconds after the first signal when the task is cancelled and the context ends without an exception.
        request: counts as a signal whenever it is asked.

    Yields:
        The event.

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

    heard = SIGNALS if threading.current_thread() is threading.main_thread() else ()  # Python's rule
    for number in heard:
        loop.add_signal_handler(number, on_signal)
    try:
        with (request or StopRequest()).heard_by(lambda: loop.call_soon_threadsafe(on_signal)):
            yield stop
    except asyncio.CancelledError:
        if not is_overdue:
            raise
        task.uncancel()
    finally:
        for timer in deadline:
            timer.cancel()
        for number in heard:
            loop.remove_signal_handler(number)
