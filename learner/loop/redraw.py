"""Drawing again what went down with a cluster node: the same request gives the same bits."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol.errors import ShardLostError

Result = TypeVar("Result")
DRAWS = 3
"""How often the same thing is drawn before its loss ends the run."""


async def redraw_if_lost(draw: Callable[[], Awaitable[Result]]) -> Result:
    """What `draw` gives; it is called again when its trajectories or images were lost on the way.

    Raises:
        ShardLostError: lost `DRAWS` times.
    """
    for _ in range(DRAWS - 1):
        try:
            return await draw()
        except ShardLostError:
            continue
    return await draw()
