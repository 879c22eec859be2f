"""Which side waits is read off the counted forwards, with worked numbers."""

from collections.abc import Callable

import pytest

from deploy.tools.planning.balance import balance_line, balance_of
from protocol.config.run import RunConfig
from tests.support.runs.balance import COUNTS, config_of


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


def test_one_line_says_which_side_waits(tiny_config: Callable[..., RunConfig]) -> None:
    line = balance_line(config_of(tiny_config, actors=5, workers=1), COUNTS)
    assert "a learner worker works as long as 2,400 forwards take; they take turns" in line
    assert "the rollout actors wait 89% of the time, the learner workers wait 11%" in line


def test_bundles_take_turns_and_each_counts_as_one_gpu(tiny_config: Callable[..., RunConfig]) -> None:
    config = config_of(tiny_config, actors=4, workers=4, scale="prompt", layout="colocated")
    balance = balance_of(config, COUNTS)
    assert (balance.rollout, balance.update, balance.iteration) == (300, 600, 900), "3 of 12 shards for each"
    assert "they take turns: the rollout actors wait 67% of the time" in balance_line(config, COUNTS)
