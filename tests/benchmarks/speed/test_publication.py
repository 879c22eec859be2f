"""The benchmark of publication and reduction: its payloads have the stated size, and its lanes are really added."""

import pytest

from benchmarks.simulated import arrays_of
from benchmarks.speed.publication import own_lanes


def test_payloads_are_as_large_as_stated_and_in_as_many_arrays_as_a_lora_has():
    arrays = arrays_of(20e6)
    assert len(arrays) == 384
    assert sum(array.nbytes for array in arrays.values()) == pytest.approx(20e6, rel=1e-3)


def test_the_lanes_of_one_worker_are_timed():
    figures = own_lanes(1, lanes=4, rounds=1)
    assert (figures["mb"], figures["lanes"]) == (1, 4)
    assert figures["take_s"] > 0
