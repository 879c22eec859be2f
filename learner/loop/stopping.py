"""Waiting for work that a stop may end early."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Await `work`, but no longer than until `stop` is set; it is then cancelled.

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
