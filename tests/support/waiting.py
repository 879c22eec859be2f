"""Waiting for progress: until something holds, with one generous bound; a loaded machine is slow, not wrong."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 120.0
"""Longest wait of a test for one thing; a test that needs all of it has failed."""
_PAUSE_S = 0.02


def wait_until(holds: Callable[[], bool], *, why: str = "it did not come about") -> None:
    """Return as soon as it holds.

    Raises:
        AssertionError: it did not within `PATIENCE_S`.
    """
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, why
        time.sleep(_PAUSE_S)


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return as soon as it holds; the event loop goes on meanwhile.

    Raises:
        AssertionError: it did not within `PATIENCE_S`.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = holds()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(_PAUSE_S)
