"""Which side waits is read off the counted forwards, with worked numbers."""

from collections.abc import Callable

import pytest

from deploy.tools.balance import advice, balance_of, best_split
from deploy.tools.estimate import Evaluations
from protocol.config.run import RunConfig

COUNTS = Evaluations(
    trajectories=96,
    rollout=1200,
    images=0,
    pairs=0,
    learner=2400,
    forward_flops=2e12,
)


def config_of(
    tiny_config: Callable[..., RunConfig], *, actors: int, workers: int, lag: int = 0, scale: str = "iteration"
) -> RunConfig:
    return tiny_config(
        group={"size": 8, "shard": 8, "per_iteration": 12, "max_lag": lag},
        learner={"updates_per_iteration": 1},
        credit={"rule": "gains", "values": "raw", "scale": scale},
        cluster={"rollout_actors": actors, "learner": {"workers": workers}},
    )


def test_sides_that_take_turns_wait_for_each_other(tiny_config: Callable[..., RunConfig]) -> None:
    balance = balance_of(config_of(tiny_config, actors=3, workers=1), COUNTS)
    assert (balance.rollout, balance.update, balance.iteration) == (400, 2400, 2800)
    assert balance.waits() == pytest.approx({"rollout actors": 6 / 7, "learner workers": 1 / 7})


def test_with_a_lag_an_iteration_takes_as_long_as_the_slower_side(tiny_config: Callable[..., RunConfig]) -> None:
    balance = balance_of(config_of(tiny_config, actors=3, workers=1, lag=1), COUNTS)
    assert (balance.iteration, balance.waits()["learner workers"]) == (2400, 0)


def test_credit_of_single_groups_overlaps_without_a_lag(tiny_config: Callable[..., RunConfig]) -> None:
    assert balance_of(config_of(tiny_config, actors=3, workers=1, scale="prompt"), COUNTS).overlaps


def test_whole_shards_go_to_whole_actors_and_lanes_to_workers(tiny_config: Callable[..., RunConfig]) -> None:
    balance = balance_of(config_of(tiny_config, actors=5, workers=8), COUNTS)
    assert balance.rollout == 300, "12 shards for 5 actors: one has 3"
    assert balance.update == 400, "12 shards on 8 lanes: the first lanes have 2 of 12"


def test_the_best_split_of_six_actors(tiny_config: Callable[..., RunConfig]) -> None:
    best = best_split(config_of(tiny_config, actors=5, workers=1), COUNTS)
    assert (best.actors, best.workers, best.iteration) == (2, 4, 600), (
        "3 of 12 shards on lanes 0 and 4, 6 shards on an actor"
    )


def test_the_advice_names_keys_and_with_a_rate_seconds_and_gpu_hours(tiny_config: Callable[..., RunConfig]) -> None:
    lines = list(advice(config_of(tiny_config, actors=5, workers=1), COUNTS, tflops=200))
    assert any("group.max_lag=1" in line for line in lines)
    assert any("cluster.rollout_actors=2 and cluster.learner.workers=4" in line for line in lines)
    assert "a forward takes 0.01 s: an iteration takes 27 s" in lines[-1]
