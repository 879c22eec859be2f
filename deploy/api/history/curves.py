"""Metrics of whole runs as curves: thousands of iterations become a few hundred points, each with its range.

The server reads every line of a run once and keeps the numbers as columns, so a page fetches only what it can draw.
"""

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

from deploy.api.source import Source
from protocol.status import Document, MetricLine, RunStatus

LINES_AT_ONCE = 1_000
"""Lines of one reading; other requests are served in between."""
RUNS_HELD = 12
"""Largest number of runs whose columns are kept."""
POINTS, MOST_POINTS = 300, 1_000
MOST_SERIES = 200
REWARD, SECONDS = "reward/mean", "seconds/iteration"
DIGITS = 6
By = Literal["iteration", "seconds"]


class Series(Document):
    """One metric of a run, [P] points."""

    x: int
    """Index of its points in `x` of the answer."""
    y: list[float]
    """[P] mean of the values of a point."""
    each: float
    """Mean number of lines of a point."""
    low: list[float] | None = None
    """[P] the lowest of the values; null if every point has one value."""
    high: list[float] | None = None
    """[P] the highest of the values."""


class Curves(Document):
    """Metrics of a run by iteration or by training seconds."""

    run: str
    session: str
    lines: int
    """Number of metric lines that it covers."""
    by: By
    first: float
    """Start of the run on that axis."""
    last: float
    """End of the run so far."""
    width: float
    """The part of the axis that a point covers; 0 if each point is one line."""
    x: list[list[float]]
    """Positions of the points: mean iteration, or mean training seconds."""
    series: dict[str, Series]
    """By the names of docs/metrics.md."""
    left_out: int
    """Metrics beyond the 200 that an answer holds."""


@dataclass
class _Columns:
    """The numbers of one run; a metric's rows are the lines that hold it."""

    session: str
    seq: int = 0
    spent: float = 0.0
    iteration: array = field(default_factory=lambda: array("d"))
    seconds: array = field(default_factory=lambda: array("d"))
    """Training seconds up to the end of each row."""
    rows: dict[str, array] = field(default_factory=dict)
    values: dict[str, array] = field(default_factory=dict)

    def add(self, line: MetricLine) -> None:
        """Add one line; a damaged one has no iteration and is left out."""
        self.seq = line.seq
        iteration = line.values.get("iteration")
        if iteration is None:
            return
        if REWARD in line.values:
            self.spent += line.values.get(SECONDS) or 0.0
        row = len(self.iteration)
        self.iteration.append(iteration)
        self.seconds.append(self.spent)
        for name, value in line.values.items():
            if value is not None and name != "iteration":
                if name not in self.values:
                    self.rows[name], self.values[name] = array("I"), array("d")
                self.rows[name].append(row)
                self.values[name].append(value)


class CurveCache:
    """The columns of the runs that clients asked for most recently."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._columns: dict[str, _Columns] = {}
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock lives as long as a request has it."""

    async def curves(
        self,
        status: RunStatus,
        names: Sequence[str],
        *,
        by: By = "iteration",
        points: int = POINTS,
        window: tuple[float | None, float | None] = (None, None),
    ) -> Curves:
        """Return metrics of a run.

        Args:
            names: names, or patterns in which `*` stands for anything; a name that ends with `/` is a prefix.
            window: part of the axis; None for an open end.

        Returns:
            The curves, thinned to at most `points` points of equal width.
        """
        lock = self._reading.setdefault(status.run, asyncio.Lock())
        async with lock:  # requests that come at the same time share one reading; none reads while another one thins
            columns = await self._read(status)
            return await asyncio.to_thread(_thinned, status.run, columns, names, by, points, window)

    async def _read(self, status: RunStatus) -> _Columns:
        columns = self._columns.pop(status.run, None)
        if columns is None or columns.session != status.session or columns.seq > status.lines:
            columns = _Columns(status.session)
        while columns.seq < status.lines:
            limit = min(LINES_AT_ONCE, status.lines - columns.seq)  # no line beyond the status's count
            lines = await self._source.lines(status.run, since=columns.seq, limit=limit)
            for line in lines:
                columns.add(line)
            if not lines:
                break
            await asyncio.sleep(0)
        self._columns[status.run] = columns
        while len(self._columns) > RUNS_HELD:
            del self._columns[next(iter(self._columns))]
        return columns


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether names and patterns select a metric: `*` stands for anything; a trailing `/` makes a prefix."""
    return any(fnmatchcase(name, f"{each}*" if each.endswith("/") else each) for each in patterns)


def _thinned(
    run: str,
    columns: _Columns,
    names: Sequence[str],
    by: By,
    points: int,
    window: tuple[float | None, float | None],
) -> Curves:
    axis = np.array(columns.iteration if by == "iteration" else columns.seconds)
    begin, end = (float(axis.min()), float(axis.max())) if len(axis) else (0.0, 0.0)
    low = begin if window[0] is None else window[0]
    high = end if window[1] is None else window[1]
    wanted = [name for name in list(columns.values) if is_wanted(name, names)]
    inside = int(((axis >= low) & (axis <= high)).sum())
    width = _width(high - low, points) if inside > points else 0.0
    known: dict[bytes, int] = {}
    x: list[list[float]] = []
    series = {}
    for name in wanted[:MOST_SERIES]:
        rows = np.array(columns.rows[name][: len(columns.values[name])])
        values = np.array(columns.values[name])[: len(rows)]
        at = axis[rows]
        held = (at >= low) & (at <= high)
        at, values = at[held], values[held]
        if not len(at):
            continue
        begins = _begins(at, width)
        counts = np.diff([*begins, len(at)])
        where = np.add.reduceat(at, begins) / counts
        index = known.setdefault(where.tobytes(), len(x))
        if index == len(x):
            x.append(_numbers(where))
        y = np.add.reduceat(values, begins) / counts
        series[name] = Series(x=index, y=_numbers(y), each=len(at) / len(begins))
        if len(begins) < len(at):
            series[name].low = _numbers(np.minimum.reduceat(values, begins))
            series[name].high = _numbers(np.maximum.reduceat(values, begins))
    left_out = max(0, len(wanted) - MOST_SERIES)
    return Curves(
        run=run,
        session=columns.session,
        lines=columns.seq,
        by=by,
        first=begin,
        last=end,
        width=width,
        x=x,
        series=series,
        left_out=left_out,
    )


def _begins(at: np.ndarray, width: float) -> np.ndarray:
    """Return the first row of each point; `at` ascends."""
    if not width:
        return np.arange(len(at))
    return np.flatnonzero(np.diff(np.floor(at / width), prepend=np.nan) != 0)


def _width(span: float, points: int) -> float:
    """Return the least of 1, 2, 5, 10, 20 … that cuts a span into at most `points` parts; so two runs' parts align."""
    scale = 10.0 ** math.floor(math.log10(max(span / points, 1e-9)))
    return next(width for factor in (1, 2, 5, 10, 20) if span / (width := factor * scale) <= points)


def _numbers(values: np.ndarray) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
