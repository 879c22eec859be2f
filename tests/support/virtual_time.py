"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing else is to be done.

An hour passes at once, and no machine is too slow for a deadline. For coroutines that wait for each other and for
timers only: a thread or a socket that answers later finds that time has passed meanwhile.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Jumping(selectors.SelectSelector):
    """A selector that passes the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; if nothing is, the time is later by `timeout` seconds."""
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0."""

    def __init__(self) -> None:
        self.clock = Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        """Seconds since the loop began, in virtual time."""
        return self.clock.now


def run_at_once(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)
