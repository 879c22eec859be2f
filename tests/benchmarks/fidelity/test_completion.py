"""A row of the fidelity table is the mean rank correlation with the reference."""

import numpy as np
import pytest

from benchmarks.fidelity.completion import WAYS, Point, summarise


def test_a_row_is_the_mean_rank_correlation_over_the_points_that_the_reference_ranks() -> None:
    rising, falling, equal = np.array([1.0, 2, 3]), np.array([3.0, 2, 1]), np.ones(3)
    points = [
        Point(way, prompt, 0, 1, np.zeros((3, 1)), {"s": falling if way == "tweedie" and prompt else rising})
        for way in WAYS
        for prompt in (0, 1)
    ]
    points += [Point(way, 2, 0, 1, np.zeros((3, 1)), {"s": equal}) for way in WAYS]
    points += [
        Point(way, 3, 0, 1, np.zeros((3, 1)), {"s": equal if way in ("tweedie", "euler 3") else rising}) for way in WAYS
    ]
    rows = {row["way"]: row for row in summarise(points)}
    assert rows["euler 3"]["s against remaining schedule"] == pytest.approx(2 / 3), "no ranking where there is one is 0"
    assert rows["tweedie"]["s against remaining schedule"] == pytest.approx(0)
    assert rows["euler 2"]["s against remaining schedule"] == pytest.approx(1)
