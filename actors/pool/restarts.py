"""How often a part of a run may be restarted within a window, and how long each restart waits."""

import math
import time
from collections import deque
from collections.abc import Callable

from tenacity import RetryCallState, Retrying, wait_exponential

from protocol.errors import PoolError

PAUSE_S = (0.5, 30.0)
"""Seconds before the second restart within the window, and the longest pause; the first restart is immediate."""


def backoff_s(failures: int, bounds_s: tuple[float, float]) -> float:
    """Return the seconds to wait after this many failures in a row: the lower bound, then twice as long each time."""
    shortest, longest = bounds_s
    state = RetryCallState(Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = failures
    return wait_exponential(multiplier=shortest, max=longest)(state)


class RestartBudget:
    """Counts failures. A failure no longer counts when it is older than the window and older than the newest success.

    So a part that always fails ends its run, even if each try takes a large share of the window.

    budget = RestartBudget("rollout", limit=10, within_s=3600)
    await asyncio.sleep(budget.spend("killed"))      # then start the replacement
    budget.succeed()                                 # the replacement works
    """

    def __init__(self, name: str, *, limit: int, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            name: what fails, for the error.
            limit: most failures within the window of `within_s` seconds.
        """
        self.total = 0
        self._name = name
        self._limit = limit
        self._within_s = within_s
        self._clock = clock
        self._failures: deque[float] = deque()
        self._succeeded = -math.inf

    def succeed(self) -> None:
        """Note that the part works, so that old failures may be forgotten."""
        self._succeeded = self._clock()

    def spend(self, reason: str) -> float:
        """Count a failure and return how many seconds to wait: 0, then 0.5, 1, 2 … up to 30.

        Raises:
            PoolError: more than `limit` failures count.
        """
        now = self._clock()
        self.total += 1
        self._failures.append(now)
        forgotten = min(now - self._within_s, self._succeeded)
        while self._failures[0] < forgotten:
            self._failures.popleft()
        recent = len(self._failures)
        if recent > self._limit:
            is_recent = now - self._failures[0] <= self._within_s
            span = f"within {self._within_s:g} s" if is_recent else "without a success"
            raise PoolError(f"{self._name} used up its {self._limit} restarts {span}; last failure: {reason}")
        return 0.0 if recent == 1 else backoff_s(recent - 1, PAUSE_S)
