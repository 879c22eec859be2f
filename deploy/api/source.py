"""The interface through which the status API and the command line read runs, and how to open one."""

from pathlib import Path
from typing import Protocol

from protocol.commands import Command
from protocol.errors import ConfigError
from protocol.ground.addresses import SCHEMES, shown_source
from protocol.ground.resources import resolve
from protocol.status import Event, MetricLine, RunStatus, TrajectoryRecord


class Source(Protocol):
    """A source of statuses: a board, or a folder of runs. Every method raises BoardError if the board is away."""

    async def ping(self) -> None:
        """Return if the source can be read, without reading a run."""
        ...

    async def runs(self) -> list[RunStatus]:
        """Return all runs, newest first."""
        ...

    async def status(self, run: str) -> RunStatus | None: ...

    async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
        """Return at most `limit` metric lines with a `seq` above `since`, oldest first.

        Args:
            since: return lines after this `seq`; 0 for all.
        """
        ...

    async def events(self, run: str, *, since: int, limit: int) -> list[Event]:
        """Return at most `limit` events with a number above `since`, oldest first.

        Args:
            since: return events after this number; 0 for all.
        """
        ...

    async def folder(self, run: str) -> Path | None:
        """Return the run's folder; None if there is none, or if only a board is read."""
        ...

    async def record(self, run: str, iteration: int) -> TrajectoryRecord | None:
        """Return the trajectories recorded at an iteration."""
        ...

    async def command(self, run: str, command: str) -> Command | None:
        """Return a command with its outcome, by its id."""
        ...

    async def send(self, run: str, command: Command) -> None: ...

    async def close(self) -> None: ...


def open_source(where: str) -> Source:
    """Open a board by its address, or a folder.

    Raises:
        ConfigError: it is neither.
    """
    if where.partition("://")[0] in SCHEMES:
        from deploy.board.board import Board

        return Board(where)
    from deploy.api.folder_source import FolderSource

    folder = resolve(where)
    if not folder.is_dir():
        raise ConfigError(
            f"{shown_source(where)} is not a folder: give a run folder, a folder of runs or a board's address"
        )
    return FolderSource(folder)
