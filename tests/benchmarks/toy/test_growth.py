"""Memory of a long run: growth is found, and what came and went is left out."""

import pytest

from benchmarks.heap import in_use_mib
from benchmarks.toy.growth import rows


def test_growth_is_the_slope_after_the_first_tenth() -> None:
    grows = [(at, 100 + 0.01 * at if at >= 200 else 500.0) for at in range(0, 2000, 10)]
    table = dict(rows({"learner": grows, "driver": [(at, 70.0) for at, _ in grows]}, 2000))
    assert table["learner"] == pytest.approx([104.2, 108.7, 113.2, 117.7, 10], abs=0.5)
    assert table["driver"] == pytest.approx([70, 70, 70, 70, 0])


def test_a_role_that_did_not_live_through_the_run_has_no_row() -> None:
    assert not dict(rows({"once": [(5, 1.0), (900, 2.0)]}, 1000))


def test_what_is_in_use_follows_what_the_program_holds() -> None:
    before = in_use_mib()
    held = [bytes(100_000) for _ in range(300)]
    assert in_use_mib() - before == pytest.approx(300 * 100_000 / 2**20, rel=0.05)
    del held
    assert in_use_mib() - before == pytest.approx(0, abs=2)
