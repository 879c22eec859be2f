"""Lines kept as columns are the lines that were added, in a part of the memory."""

import tracemalloc

import numpy as np

from deploy.report.lines import Lines

ADDED = [
    {"iteration": 1, "reward/mean": 0.5, "seconds": 2.0, "train/loss": None},
    {"iteration": 2, "reward/mean": 0.25, "seconds": 4.0, "gain": 3.0},
    {"iteration": 3, "seconds": 6.0, "gain": 1.0},
]


def lines_of(added: list[dict]) -> Lines:
    lines = Lines()
    for line in added:
        lines.append(line)
    return lines


def test_lines_come_back_without_nulls() -> None:
    lines = lines_of(ADDED)
    assert list(lines) == [{key: value for key, value in line.items() if value is not None} for line in ADDED]
    assert lines[-1] == ADDED[2] and lines[:2] == [lines[0], lines[1]] and len(lines) == 3 and not Lines()
    assert isinstance(lines[0]["iteration"], int)
    assert list(lines.names()) == ["iteration", "reward/mean", "seconds", "gain"]


def test_a_column_comes_with_those_beside_it() -> None:
    gain, iteration, seconds = lines_of(ADDED).columns("gain", "iteration", "seconds")
    np.testing.assert_array_equal([gain, iteration, seconds], [[3, 1], [2, 3], [4, 6]])
    assert [len(each) for each in lines_of(ADDED).columns("nothing", "iteration", "seconds")] == [0, 0, 0]


def test_a_long_run_takes_at_most_sixteen_bytes_for_a_number() -> None:
    names = [f"metric/{index}" for index in range(100)]
    tracemalloc.start()
    lines = lines_of([])
    for row in range(2_000):
        lines.append({name: row + index / 7 for index, name in enumerate(names)})
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 16 * 2_000 * len(names)
