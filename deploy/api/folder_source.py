"""The status of the runs in a folder: from the embedded board of a live run, from the files of any other.

Names that clients send are looked up among the runs that were found; they never become part of a path. For an ended run
`status.json` is enough for a list of runs; `metrics.jsonl` is read when a client asks for its lines.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.board.embedded import BOARD_URL, is_board_of
from deploy.folder.lease import STALE_S, beats_of, has_ended
from deploy.folder.metric_file import Outline, last_line, outline_of, page_of
from deploy.folder.names import CONFIG, METRICS, STATUS, TRAJECTORIES
from deploy.folder.read import StatusFile, config_of, status_of
from deploy.monitor import summary as overview
from protocol.commands import Command
from protocol.errors import BoardError, ConfigError, RunFolderError
from protocol.status import ENDED, Event, MetricLine, RunStatus, TrajectoryRecord, run_id_of

if TYPE_CHECKING:
    from deploy.board.board import Board

SCAN_S = 2.0
"""Seconds between two scans of the folder."""
FILES_HELD = 16
"""Runs whose events and commands are kept in memory."""
Stamps = tuple[tuple[int, int], ...]
"""Modification time and size of files."""


@dataclass
class _Run:
    path: Path
    """Resolved, without links."""
    board: "Board | None" = None
    status: tuple[Stamps, RunStatus] | None = None
    outline: tuple[Stamps, Outline] | None = None
    beats: tuple[object, float] | None = None
    """Beats of the folder's lease, and when they were first seen, on this process's clock."""

    @property
    def name(self) -> str:
        """The run's name on its board, whatever path or link led to its folder."""
        return run_id_of(self.path.name)


class FolderSource:
    """A `Source` over a run folder, or over a folder of run folders."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runs: dict[str, _Run] = {}
        self._scanned: float | None = None
        self._scanning = asyncio.Lock()

    async def close(self) -> None:
        await _close(self._runs.values())

    async def ping(self) -> None:
        """Raise BoardError if the folder cannot be read."""
        if not self._root.is_dir():
            raise BoardError(f"{self._root} is not a folder")

    async def runs(self) -> list[RunStatus]:
        found = await self._scan()
        filed = await asyncio.to_thread(_filed_runs, found)
        live = [self.status(name) for name in found if name not in filed]
        statuses = [*filed.values(), *(status for status in await asyncio.gather(*live) if status)]
        return sorted(statuses, key=lambda status: -status.updated)

    async def status(self, run: str) -> RunStatus | None:
        """Return one run, from its board if that answers, otherwise from its files."""
        found = (await self._scan()).get(run)
        if found is None:
            return None
        if board := await self._live(found):
            try:
                status = await board.status(found.name)
            except BoardError:
                status = None
            if status:
                return status.model_copy(update={"run": run})
        return await asyncio.to_thread(_filed, run, found)

    async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
        found = (await self._scan()).get(run)
        if found is None:
            return []
        if board := await self._live(found):
            lines = await board.lines(found.name, since=since, limit=limit)
            if not lines or lines[0].seq == since + 1:
                return lines
        return await asyncio.to_thread(_page, found, since, limit)  # also what the board has dropped

    async def events(self, run: str, *, since: int, limit: int) -> list[Event]:
        found = (await self._scan()).get(run)
        if found is None:
            return []
        if board := await self._live(found):
            return await board.events(found.name, since=since, limit=limit)
        file = await asyncio.to_thread(_file, found)
        return [event for event in file.events if event.number > since][:limit] if file else []

    async def folder(self, run: str) -> Path | None:
        found = (await self._scan()).get(run)
        return found.path if found else None

    async def record(self, run: str, iteration: int) -> TrajectoryRecord | None:
        from deploy.monitor.trajectories import read_record

        found = (await self._scan()).get(run)
        return await asyncio.to_thread(read_record, found.path / TRAJECTORIES, iteration) if found else None

    async def command(self, run: str, command: str) -> Command | None:
        found = (await self._scan()).get(run)
        if found is None:
            return None
        if board := await self._live(found):
            return await board.command(found.name, command)
        file = await asyncio.to_thread(_file, found)
        return next((held for held in file.commands if held.id == command), None) if file else None

    async def send(self, run: str, command: Command) -> None:
        """Send a command to a run (BoardError: it is not live)."""
        found = (await self._scan()).get(run)
        board = await self._live(found) if found else None
        if found is None or board is None:
            raise BoardError(f"run {run} has no board that answers: it takes no commands")
        await board.send(found.name, command)

    async def _scan(self) -> dict[str, _Run]:
        async with self._scanning:
            if self._scanned is None or time.monotonic() - self._scanned > SCAN_S:
                known = {run.path: run for run in self._runs.values()}
                paths = await asyncio.to_thread(_run_folders, self._root)
                self._runs = {name: known.pop(path, None) or _Run(path) for name, path in _named(paths).items()}
                self._scanned = time.monotonic()
                await _close(known.values())
        return self._runs

    async def _live(self, run: _Run) -> "Board | None":
        """Return the run's own board, if it answers."""
        url = _board_url(run)
        if run.board and run.board.url != url:
            gone, run.board = run.board, None
            await gone.close()
        if url and run.board is None:
            from deploy.board.board import Board

            with suppress(ConfigError):  # a damaged address counts as no board
                run.board = Board(url)
        board = run.board
        if board:
            try:
                await board.ping()
            except BoardError:
                return None
        return board


async def _close(runs: Iterable[_Run]) -> None:
    for run in runs:
        if run.board:
            await run.board.close()


def _named(paths: Iterable[Path]) -> dict[str, Path]:
    """Name each run like its folder; if another run has that name, a digest of the path is appended."""
    named: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (run_id_of(path.name) != path.name, path)):  # exact names come first
        name = run_id_of(path.name)
        if name in named:
            name = f"{name[:91]}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
        named[name] = path
    return named


def _run_folders(root: Path) -> set[Path]:
    """Find the folders that hold a run, without links."""
    if isfile(root / CONFIG):
        return {root.resolve()}
    try:
        own, inside = root.resolve(), list(root.iterdir())
    except OSError:
        return set()
    paths = set()
    for path in inside:
        with suppress(OSError, RuntimeError):  # a link to itself
            paths.add(path.resolve() if path.is_symlink() else own / path.name)
    return {path for path in paths if isfile(path / CONFIG)}


def _board_url(run: _Run) -> str | None:
    try:
        url = (run.path / BOARD_URL).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return url if is_board_of(url, run.path) else None


def _filed_runs(runs: dict[str, _Run]) -> dict[str, RunStatus]:
    """Return the statuses of all runs that have no board now, nor had one before."""
    return {name: _filed(name, run) for name, run in runs.items() if run.board is None and _board_url(run) is None}


def _filed(name: str, run: _Run) -> RunStatus:
    """Return the status in the run's folder; if the run has not ended, the folder's lease shows whether it lives."""
    status = _held(name, run)
    if status.phase in ENDED:
        return status
    now, beats = time.monotonic(), beats_of(run.path)
    if run.beats is None or run.beats[0] != beats:
        run.beats = beats, now
    is_silent = has_ended(run.path) or now - run.beats[1] > STALE_S
    return status.model_copy(update={"stale_since": status.updated} if is_silent else {"silent_s": 0.0})


def _file(run: _Run) -> StatusFile | None:
    """Return the run's `status.json` with its events and commands."""
    return _read_file(run.path, stamps_of(run.path, STATUS))


@lru_cache(maxsize=FILES_HELD)
def _read_file(run: Path, _stamps: Stamps) -> StatusFile | None:
    """Read the file once as long as it stays the same."""
    return status_of(run)


def _held(name: str, run: _Run) -> RunStatus:
    """Return the status in the run's folder; it is read again when a file has changed."""
    stamps, held = stamps_of(run.path, METRICS, STATUS), run.status
    if held is None or held[0] != stamps or held[1].run != name:
        held = run.status = stamps, _read_status(name, run)
    return held[1]


def _read_status(name: str, run: _Run) -> RunStatus:
    """Read `status.json`, or derive the status from the other files."""
    file = status_of(run.path)
    status = file.status.model_copy(update={"run": name}) if file else None
    if status and status.phase in ENDED and _has_all(status, last_line(run.path / METRICS)):
        return status
    outline = _outline(run)
    lines = [overview.line_of(number, values) for number, values in outline.lines]
    done = max((int(line.values.get("iteration") or 0) for line in lines), default=0)
    if status is None:
        status = _derived(name, run.path, lines, done)
    facts = {"rewards": overview.rewards_of(lines), "metrics": overview.metrics_of(lines)}
    return status.model_copy(update={"iteration": done, "lines": outline.count} | facts)


def _has_all(status: RunStatus, line: dict[str, object] | None) -> bool:
    """Tell whether a status was written after the last line of the metrics."""
    return line is not None and line["iteration"] == status.iteration and status.lines > 0


def _derived(name: str, path: Path, lines: list[MetricLine], done: int) -> RunStatus:
    """Derive the status of a run without `status.json`."""
    try:
        iterations = config_of(path).iterations
    except RunFolderError:
        iterations = 0
    changed = max(moment for moment, _ in stamps_of(path, METRICS, CONFIG)) / 1e9
    return RunStatus(
        run=name,
        session="",
        phase="finished" if done >= iterations else "stopped",
        iteration=done,
        iterations=iterations,
        started=changed,
        updated=changed,
        bottleneck=overview.bottleneck_of(overview.stages_of(overview.metrics_of(lines)), {}),
    )


def _page(run: _Run, since: int, limit: int) -> list[MetricLine]:
    found = page_of(run.path / METRICS, _outline(run), since=since, limit=limit)
    return [overview.line_of(number, values) for number, values in found]


def _outline(run: _Run) -> Outline:
    """Return the outline of the run's metrics; it is read again when the file has changed."""
    stamps, held = stamps_of(run.path, METRICS), run.outline
    if held is None or held[0] != stamps:
        held = run.outline = stamps, outline_of(run.path / METRICS)
    return held[1]


def stamps_of(folder: Path, *names: str) -> Stamps:
    """Return modification time and size of files of a folder; zeros for a missing one."""
    return tuple(_changed(folder / name) for name in names)


def _changed(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
