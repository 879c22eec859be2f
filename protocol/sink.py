"""Where any part of a run says what people should know beyond numbers: conditions that hold for a while, and events.

The words are those of Kubernetes: a type, whether it holds, a reason in one word, a message in one line. A condition
that holds is good.
"""

from typing import Protocol


class StatusSink(Protocol):
    """Served by `deploy.run.events`. Never waits and never fails."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """State that something holds (good), does not, or is unknown (None); saying it again changes nothing."""
        ...

    def event(self, message: str, kind: str = "info") -> None:
        """Something happened."""
        ...
