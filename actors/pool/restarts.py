"""How often a part of a run may be replaced: a number of times within a window, with growing pauses in between."""

import time
from collections import deque
from collections.abc import Callable

from protocol.errors import PoolError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class RestartBudget:
    """Counts losses; one that is older than the window no longer counts.

    budget = RestartBudget("rollout", limit=10, within_s=3600)
    await asyncio.sleep(budget.spend("killed"))      # then start the replacement
    """

    def __init__(self, name: str, *, limit: int, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._name = name
        self._limit = limit
        self._within_s = within_s
        self._clock = clock
        self._failures: deque[float] = deque()

    def spend(self, reason: str) -> float:
        """Count a loss and say how many seconds to wait: 0, then 0.5, 1, 2 … up to 30.

        Raises:
            PoolError: more than `limit` losses within the window.
        """
        now = self._clock()
        self.total += 1
        self._failures.append(now)
        while now - self._failures[0] > self._within_s:
            self._failures.popleft()
        recent = len(self._failures)
        if recent > self._limit:
            raise PoolError(
                f"{self._name} used up its {self._limit} restarts within {self._within_s:g} s; last loss: {reason}"
            )
        return 0.0 if recent == 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (recent - 2))
