"""The port through which the service reads runs."""

from typing import Protocol

from protocol.commands import Command
from protocol.status import Event, MetricLine, RunStatus, TrajectoryRecord


class Source(Protocol):
    """Where status comes from: a board, or a folder of runs. Raises BoardError when it does not answer."""

    async def runs(self) -> list[RunStatus]:
        """All runs, newest first."""
        ...

    async def status(self, run: str) -> RunStatus | None:
        """One run."""
        ...

    async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
        """Metric lines with a `seq` above `since`, oldest first."""
        ...

    async def events(self, run: str, *, since: int, limit: int) -> list[Event]:
        """Events with a number above `since`, oldest first."""
        ...

    async def record(self, run: str, iteration: int) -> TrajectoryRecord | None:
        """The trajectories recorded at an iteration."""
        ...

    async def command(self, run: str, command: str) -> Command | None:
        """One command with its outcome."""
        ...

    async def ask(self, run: str, command: Command) -> None:
        """Ask something of a run."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
