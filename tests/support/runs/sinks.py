"""Status sinks for tests."""


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
