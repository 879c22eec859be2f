"""Where any part of a run tells people more than numbers: conditions, which hold for a while, and events.

A condition has Kubernetes' fields: a type, whether it holds, a reason in one word, a message in one line. A condition
that holds is good.
"""

from typing import Protocol


class StatusSink(Protocol):
    """Served by `deploy.monitor.journal.RunJournal`; may be called from any thread and never fails."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """State that something holds (good), does not hold, or is unknown (None).

        Args:
            type: what the condition is about, such as `ClusterFits`; there is one condition of a type.
            holds: whether it holds.
            reason: one word in CamelCase, for programs.
            message: one line for people.
        """
        ...

    def event(self, message: str, kind: str = "info") -> None:
        """Tell that something happened; `kind` is `info`, `warning`, `error` or a word of its own."""
        ...
