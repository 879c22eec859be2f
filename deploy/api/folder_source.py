"""The status of the runs in a folder: from the embedded board of a live run, from the files of any other.

Names that clients send are looked up among the runs that were found; they never become part of a path.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.board.board import Board
from deploy.folder.names import BOARD_URL, CONFIG, METRICS, STATUS, TRAJECTORIES
from deploy.folder.read import StatusFile, config_of, earlier_sign, lines_of, status_of
from deploy.monitor import summary as overview
from deploy.monitor.trajectories import read_records
from protocol.commands import Command
from protocol.errors import BoardError, ConfigError, RunFolderError
from protocol.status import Event, MetricLine, RunStatus, TrajectoryRecord, run_id_of

SCAN_S = 2.0
"""Seconds between two scans of the folder."""


@dataclass
class _Run:
    """One run folder."""

    path: Path
    board: Board | None = None
    read: tuple[float, ...] = ()
    """When the files that `lines` and `file` came from were changed."""
    lines: list[MetricLine] = field(default_factory=list)
    file: StatusFile | None = None

    @property
    def name(self) -> str:
        """The run's name on its board, whatever path or link led to its folder."""
        return run_id_of(self.path.resolve().name)


class FolderSource:
    """A `Source` over a run folder, or over a folder of run folders."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runs: dict[str, _Run] = {}
        self._scanned = 0.0

    async def close(self) -> None:
        """Close the connections."""
        for run in self._runs.values():
            if run.board:
                await run.board.close()

    async def ping(self) -> None:
        """Raise BoardError if the folder cannot be read."""
        if not self._root.is_dir():
            raise BoardError(f"{self._root} is no folder")

    async def runs(self) -> list[RunStatus]:
        """Return all runs, newest first."""
        found = [await self.status(name) for name in list(self._scan())]
        return sorted((status for status in found if status), key=lambda status: -status.updated)

    async def status(self, run: str) -> RunStatus | None:
        """Return one run, from its board if that answers, otherwise from its files."""
        found = self._scan().get(run)
        if found is None:
            return None
        if board := await self._live(found):
            try:
                status = await board.status(found.name)
            except BoardError:
                status = None
            if status:
                return status.model_copy(update={"run": run})
        file = await asyncio.to_thread(self._filed, run, found)
        return file.status if file else None

    async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
        """Return metric lines with a `seq` above `since`, oldest first."""
        found = self._scan().get(run)
        if found is None:
            return []
        if board := await self._live(found):
            return await board.lines(found.name, since=since, limit=limit)
        await asyncio.to_thread(self._filed, run, found)
        return found.lines[since : since + limit]

    async def events(self, run: str, *, since: int, limit: int) -> list[Event]:
        """Return events with a number above `since`, oldest first."""
        found = self._scan().get(run)
        if found is None:
            return []
        if board := await self._live(found):
            return await board.events(found.name, since=since, limit=limit)
        file = await asyncio.to_thread(self._filed, run, found)
        return [event for event in file.events if event.number > since][:limit] if file else []

    async def record(self, run: str, iteration: int) -> TrajectoryRecord | None:
        """Return the trajectories recorded at an iteration."""
        found = self._scan().get(run)
        if found is None:
            return None
        trajectories = await asyncio.to_thread(read_records, found.path / TRAJECTORIES)
        return next((record for record in trajectories if record.iteration == iteration), None)

    async def command(self, run: str, command: str) -> Command | None:
        """Return a command with its outcome."""
        found = self._scan().get(run)
        if found is None:
            return None
        if board := await self._live(found):
            return await board.command(found.name, command)
        file = await asyncio.to_thread(self._filed, run, found)
        return next((held for held in file.commands if held.id == command), None) if file else None

    async def ask(self, run: str, command: Command) -> None:
        """Send a command to a run (BoardError: it is not live)."""
        found = self._scan().get(run)
        board = await self._live(found) if found else None
        if found is None or board is None:
            raise BoardError(f"run {run} has no board that answers: it takes no commands")
        await board.ask(found.name, command)

    def _scan(self) -> dict[str, _Run]:
        if time.monotonic() - self._scanned > SCAN_S:
            self._scanned = time.monotonic()
            known = {run.path: run for run in self._runs.values()}
            self._runs = {}
            for path in _run_folders(self._root):
                name = run_id_of(path.resolve().name)
                if name in self._runs:
                    name = f"{name[:90]}-{len(self._runs)}"
                self._runs[name] = known.get(path) or _Run(path)
        return self._runs

    async def _live(self, run: _Run) -> Board | None:
        """The run's own board, if it answers."""
        try:
            url = (run.path / BOARD_URL).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            url = None
        if run.board and run.board.url != url:
            await run.board.close()
            run.board = None
        if url and run.board is None:
            with suppress(ConfigError):  # a damaged address is no board
                run.board = Board(url)
        if run.board:
            try:
                await run.board.ping()
            except BoardError:
                return None
        return run.board

    def _filed(self, name: str, run: _Run) -> StatusFile | None:
        """What the run left in its folder; read again when a file has changed."""
        changed = tuple(_changed(run.path / file) for file in (METRICS, STATUS))
        if changed != run.read or run.file is None:
            lines = lines_of(run.path, skips_damaged=True)
            run.lines = [overview.line_of(seq, values) for seq, values in enumerate(lines, start=1)]
            run.file = _file(name, run.path, run.lines)
            run.read = changed
        return run.file


def _run_folders(root: Path) -> list[Path]:
    """Folders that hold a run of this version."""
    if _is_run(root):
        return [root]
    try:
        return sorted(path for path in root.iterdir() if _is_run(path))
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    """Whether a folder holds a run; one of an earlier version is left out (`config_of` tells commands why)."""
    return (path / CONFIG).is_file() and earlier_sign(path) is None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _file(name: str, path: Path, lines: list[MetricLine]) -> StatusFile | None:
    """`status.json`, or what can be told without it."""
    if held := status_of(path):
        held.status.run = name
    try:
        iterations = config_of(path).iterations
    except RunFolderError:
        iterations = held.status.iterations if held else 0
    done = max((int(line.values.get("iteration") or 0) for line in lines), default=0)
    if held is None:
        newest = next((line.values for line in reversed(lines) if overview.is_iteration(line)), {})
        changed = _changed(path / METRICS) or _changed(path / CONFIG)
        status = RunStatus(
            run=name,
            session="",
            phase="finished" if done >= iterations else "stopped",
            iteration=done,
            iterations=iterations,
            started=changed,
            updated=changed,
            gains=overview.gains_of(newest),
            diagnostics=overview.diagnostics_of(newest, staleness=None),
            stages=overview.stages_of(newest),
            bottleneck=overview.bottleneck_of(overview.stages_of(newest), {}),
        )
        held = StatusFile(status=status)
    held.status.iteration, held.status.lines = done, len(lines)
    held.status.rewards = overview.rewards_of(lines)
    return held
