"""Which side waits is read off the counted forwards, with worked numbers."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from deploy.tools.balance import balance_lines, balance_of
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


def test_one_line_says_which_side_waits_and_with_a_rate_two_the_seconds_and_gpu_hours(
    tiny_config: Callable[..., RunConfig],
) -> None:
    config = config_of(tiny_config, actors=5, workers=1)
    (line,) = balance_lines(config, COUNTS)
    assert "take turns: the rollout actors wait 89% of the time, the learner workers wait 11%" in line
    lines = list(balance_lines(config, COUNTS, tflops=200))
    assert lines[-2] == (
        "at 200 TFLOP/s a forward takes 0.01 s, and an iteration takes 27 s or more, 0 s of it to decode images"
    )
    assert lines[-1] == (
        "rollout and learner together take 0.045 GPU-hours an iteration, and 0.09 GPU-hours for all 2 iterations"
    ), "27 s on six GPUs, twice"


def test_decoding_counts_in_the_seconds_of_the_rollout_actors(tiny_config: Callable[..., RunConfig]) -> None:
    counts = replace(COUNTS, decoding_flops=4e15)
    line, _ = list(balance_lines(config_of(tiny_config, actors=5, workers=1), counts, tflops=200))[-2:]
    assert "an iteration takes 31 s or more, 4 s of it to decode images" in line, "20 s of one GPU, shared by five"
    line, _ = list(balance_lines(config_of(tiny_config, actors=5, workers=1, lag=1), counts, tflops=200))[-2:]
    assert "an iteration takes 24 s or more" in line, "the learner is still the slower side"


def test_bundles_take_turns_and_each_counts_as_one_gpu(tiny_config: Callable[..., RunConfig]) -> None:
    config = config_of(tiny_config, actors=4, workers=4, scale="prompt", layout="colocated")
    balance = balance_of(config, COUNTS)
    assert (balance.rollout, balance.update, balance.iteration) == (300, 600, 900), "3 of 12 shards for each"
    lines = list(balance_lines(config, COUNTS, tflops=200))
    assert "they take turns: the rollout actors wait 67% of the time" in lines[0]
    assert "9 s or more, 0 s of it" in lines[-2] and "0.01 GPU-hours an iteration" in lines[-1], "4 GPUs for 9 s"
