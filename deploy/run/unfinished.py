"""Computations that a run in this process leaves behind: Python would wait for them at its end, perhaps for ever."""

import os
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

_left: list[Future[Any]] = []


def leave(computations: Iterable[Future[Any]]) -> None:
    """Note computations that did not end in time; their results are not wanted any more."""
    _left.extend(computations)


def end_process_if_left(code: int) -> None:
    """End this process at once if a computation that was left goes on; otherwise return."""
    if all(computation.done() for computation in _left):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
