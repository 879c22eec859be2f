"""Status sinks for tests."""

from typing import NamedTuple


class Silent:
    """One that nobody reads."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        """Nothing."""

    def event(self, message: str, kind: str = "info") -> None:
        """Nothing."""


class Told(Silent):
    """One that keeps the newest reason and message of each condition."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        """Keep it."""
        self.reasons[type], self.messages[type] = reason, message

    def of(self, type: str) -> tuple[str, str]:  # noqa: A002
        """The newest reason and message of a condition; empty before the first."""
        return self.reasons.get(type, ""), self.messages.get(type, "")


class Stated(NamedTuple):
    """A condition as it was stated."""

    type: str
    holds: bool | None
    reason: str
    message: str


class Said:
    """One that keeps every condition, in their order, and takes no events."""

    def __init__(self) -> None:
        self.conditions: list[Stated] = []

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        """Keep it."""
        self.conditions.append(Stated(type, holds, reason, message))

    def event(self, message: str, kind: str = "info") -> None:
        """What is tested states conditions only."""
        raise AssertionError(message)
