"""The scaling benchmark runs the real loop over simulated actors and compares its pace with the slowest side's."""

import pytest

from benchmarks.local_ray import local_ray
from benchmarks.simulated import Times
from benchmarks.speed.scale import STORE, Size, enough, measure, sweep_sizes
from tests.support.scenes import long_scene

TIMES = Times(shard_s=0.2, score_s=0.02, pair_s=0.001, jitter=0.1, adapter_mb=0.1)


def test_the_ideal_of_a_side_is_its_number_of_actors_by_the_time_of_its_work():
    ideal = Size(rollout=8, rewards=2, workers=4).ideal(TIMES, steps=10)
    assert ideal == pytest.approx({"rollout": 40.0, "reward": 100.0, "learner": 400.0})


def test_a_sweep_changes_one_side_at_a_time_and_says_how_many_are_enough():
    sizes = sweep_sizes()
    assert [size.rollout for side, size in sizes if side == "rollout"][-1] == 128
    assert {(size.rollout, size.workers) for side, size in sizes if side == "rewards"} == {(32, 16)}
    paces = {1: 10.0, 2: 20.0, 4: 38.5, 8: 40.0, 16: 39.0}
    rows = [{"side": "workers", "workers": number, "shards_per_s": pace} for number, pace in paces.items()]
    assert enough([*rows, {"side": "rewards", "rewards": 1, "shards_per_s": 99.0}], "workers") == 4


@long_scene
@pytest.mark.ray
@pytest.mark.whole
def test_a_short_measurement_gives_every_figure():
    size = Size(rollout=3, rewards=1, workers=1)
    with local_ray(4, object_store_memory=STORE):
        figures = measure(size, TIMES, groups=12, per_iteration=6, seats=2, lag=1)
    assert (figures["slowest"], figures["groups"]) == ("rollout", 12)
    assert 0 < figures["share_of_ideal"] <= 2, "at most an iteration's groups were ready when the clock started"
    assert figures["driver_cpu_ms_per_group"] > 0
