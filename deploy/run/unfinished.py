"""Threads that a run in this process leaves computing: Python would wait for them before it ends, perhaps for ever."""

import os
import sys
from contextlib import suppress
from threading import Thread

_left: list[Thread] = []


def leave(thread: Thread) -> None:
    """Note a thread whose computation did not end in time; its result is not wanted any more.

    Args:
        thread: the thread.
    """
    _left.append(thread)


def end_process_if_left(code: int) -> None:
    """End this process at once if a thread that was left still computes; otherwise return.

    Args:
        code: exit code of the process.
    """
    if not any(thread.is_alive() for thread in _left):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
