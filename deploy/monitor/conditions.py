"""The run's conditions: one statement of each type, with the time since which it holds.

Ports of a run state them through `protocol.sink.StatusSink`.
"""

import time
from collections.abc import Callable

from protocol.status import Condition


class Conditions:
    """Made once a run; `since` moves only when the status of a type changes.

    conditions = Conditions()
    has_changed = conditions.set("BoardConnected", False, "Refused", "the board does not answer: connection refused")
    conditions.drop("PoolSettled/rollout")
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._held: dict[str, Condition] = {}

    def set(self, type: str, holds: bool | None, reason: str, message: str) -> bool:  # noqa: A002, FBT001
        """State a condition; returns whether its status is another than before."""
        status = "Unknown" if holds is None else "True" if holds else "False"
        held = self._held.get(type)
        has_changed = held is None or held.status != status
        since = held.since if held and not has_changed else self._clock()
        self._held[type] = Condition(type=type, status=status, reason=reason, message=message, since=since)
        return has_changed

    def drop(self, type: str) -> None:  # noqa: A002
        """Say nothing more about this type."""
        self._held.pop(type, None)

    def all(self) -> list[Condition]:
        """What does not hold first, then the newest."""
        return sorted(self._held.values(), key=lambda c: (c.status == "True", -c.since, c.type))
