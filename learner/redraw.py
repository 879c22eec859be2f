"""What went down with its node is drawn again: its key gives the same numbers."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol.errors import ShardLostError

Result = TypeVar("Result")
DRAWS = 3
"""Times that the same work is done when its arrays are lost with a node again and again."""


async def redrawn(work: Callable[[], Awaitable[Result]]) -> Result:
    """The work's result, begun anew when arrays were lost on their way; the last loss is raised (`ShardLostError`)."""
    for _ in range(DRAWS - 1):
        try:
            return await work()
        except ShardLostError:
            continue
    return await work()
