"""Status sinks for tests."""


class Silent:
    """One that nobody reads."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        """Nothing."""

    def event(self, message: str, kind: str = "info") -> None:
        """Nothing."""
