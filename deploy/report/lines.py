"""The metric lines of a run as columns: thousands of lines of a hundred numbers take a tenth of the memory of dicts."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

ITERATION = "iteration"
Line = Mapping[str, Any]


class Lines(Sequence[Line]):
    """A sequence of lines, each made when it is asked for; a number that is missing or null has no key."""

    def __init__(self) -> None:
        self._count = 0
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        """By name: the lines that hold the metric, and its values."""

    def append(self, line: Line) -> None:
        for name, value in line.items():
            if value is not None:
                rows, values = self._columns.setdefault(name, (array("I"), array("d")))
                rows.append(self._count)
                values.append(value)
        self._count += 1

    def names(self) -> Iterator[str]:
        """Yield the names of the metrics in the order of their first lines."""
        yield from self._columns

    def columns(self, name: str, *beside: str) -> list[np.ndarray]:
        """Return a metric and others of the lines that hold it, each [L]; the others must be in each of these lines."""
        rows, values = self._columns.get(name, (array("I"), array("d")))
        others = (np.array(self._columns[other][1])[np.array(rows)] if len(rows) else np.zeros(0) for other in beside)
        return [np.array(values), *others]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...
    def __getitem__(self, index: int | slice) -> Line | list[Line]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        line: dict[str, Any] = {}
        for name, (rows, values) in self._columns.items():
            at = bisect_left(rows, row)
            if at < len(rows) and rows[at] == row:
                line[name] = int(values[at]) if name == ITERATION else values[at]
        return line
