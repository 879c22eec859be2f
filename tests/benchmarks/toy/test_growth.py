"""Memory of a long run: growth is found, and what came and went is left out."""

import pytest

from benchmarks.toy.growth import rows


def test_growth_is_the_slope_after_the_first_tenth() -> None:
    grows = [(at, 100 + 0.01 * at if at >= 200 else 500.0) for at in range(0, 2000, 10)]
    table = dict(rows({"learner": grows, "driver": [(at, 70.0) for at, _ in grows]}, 2000))
    assert table["learner"] == pytest.approx([104.2, 108.7, 113.2, 117.7, 10], abs=0.5)
    assert table["driver"] == pytest.approx([70, 70, 70, 70, 0])


def test_a_role_that_did_not_live_through_the_run_has_no_row() -> None:
    assert not dict(rows({"once": [(5, 1.0), (900, 2.0)]}, 1000))
