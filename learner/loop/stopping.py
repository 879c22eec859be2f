"""Wait for work that a stop may end early, and end tasks reliably."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

log = logging.getLogger(__name__)
Result = TypeVar("Result")
ROUNDS = 5
"""Number of times that a task is cancelled, one second apart."""


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Await `work`, but at most until `stop` is set; it is then cancelled.

    Returns:
        Its result, or None if it was cancelled.
    """
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()


async def unless_failed(other: "asyncio.Future[Any]", work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, but at most until `other` fails; its error is then raised here."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and other.done():
            other.result()
        return await task
    finally:
        task.cancel()


async def end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task that still runs and wait for its end; whoever awaits it gets its error."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def end_all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Cancel tasks until they have ended; a task that still runs after `ROUNDS` seconds is left running.

    Cancelling once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py uses, returns its result and drops
    the cancellation if both come at the same time.
    """
    left = set(tasks)
    for _ in range(ROUNDS):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=1.0)
    if left:
        log.warning("%d tasks do not end and are left running", len(left))
