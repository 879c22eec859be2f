"""Stops a run from outside: Ctrl-C, SIGTERM, `ray job stop`, a terminal that is closed.

| signal     | effect                                                                           | exit code |
|------------|----------------------------------------------------------------------------------|-----------|
| the first  | the update in progress ends, a checkpoint is written                             | 0         |
| (timeout)  | after `cluster.stop_within_s` seconds the run ends with its newest checkpoint    | 0         |
| the second | the run ends at once; files are whole, because each appears by a rename          | 130       |

A `stop` command through the board, and a lost lease, set the same event: they count as the first.

A closed terminal sends SIGHUP, perhaps several times: it counts as the first signal only, and `nohup` ignores it.

A resumed run repeats the interrupted work bit for bit, so each of the three costs only time.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Result = TypeVar("Result")


def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, even if an event loop is already running, as in a notebook.

    In that case it runs in another thread, which receives no signals; an interrupt of this thread cancels it.
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
    """Stops a run in another thread as signals do: the first request with a checkpoint, the second at once."""

    def __init__(self) -> None:
        """Begin without a request and without a handler."""
        self._lock = threading.Lock()
        self._count = 0
        self._handler: Callable[[], object] | None = None

    def send(self) -> None:
        """Ask the run to stop; a run that has not begun receives the request when it begins."""
        with self._lock:
            self._count += 1
            if self._handler:
                self._handler()

    @contextmanager
    def handled_by(self, handler: Callable[[], object]) -> Iterator[None]:
        """Call `handler` for each request before and during this context, in the thread that asks."""
        with self._lock:
            for _ in range(self._count):
                handler()
            self._handler = handler
        try:
            yield
        finally:
            with self._lock:
                self._handler = None


@contextmanager
def stop_on_signal(
    say: Callable[[str], None], *, within_s: float, request: StopRequest | None = None
) -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; the task that enters this context is stopped.

    Args:
        within_s: seconds from the event, whoever sets it, until the task is cancelled; the context then ends without an
            exception.

    Raises:
        CancelledError: there was a second signal.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    is_overdue = is_hung_up = False

    async def keep_deadline() -> None:
        nonlocal is_overdue
        await stop.wait()
        await asyncio.sleep(within_s)
        is_overdue = True
        say(f"the update in progress did not end within {within_s:g} s and was abandoned; a resumed run repeats it")
        task.cancel()

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
            return
        say("stopping with a checkpoint; a second signal stops at once")
        stop.set()

    def on_hangup() -> None:
        nonlocal is_hung_up
        is_hung_up = True
        if not stop.is_set():  # a shell and the system each send one for the same terminal
            on_signal()

    is_main = threading.current_thread() is threading.main_thread()  # others may not handle signals
    signals = [number for number in SIGNALS if is_main and not _is_ignored_hangup(number)]
    for number in signals:
        loop.add_signal_handler(number, on_hangup if number == signal.SIGHUP else on_signal)
    watching = asyncio.create_task(keep_deadline())
    try:
        with (request or StopRequest()).handled_by(lambda: loop.call_soon_threadsafe(on_signal)):
            yield stop
    except asyncio.CancelledError:
        if not is_overdue:
            raise
        task.uncancel()
    finally:
        watching.cancel()
        for number in signals:
            loop.remove_signal_handler(number)
        if is_hung_up:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def outliving_the_terminal() -> Iterator[None]:
    """Let processes that start in this context ignore SIGHUP: a run that it stops needs them for its checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    """Whether this is SIGHUP and the process was started with `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
