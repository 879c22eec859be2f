"""The best division of GPUs between the two sides, with worked numbers."""

from collections.abc import Callable

from benchmarks.speed.sides import best_bundles, best_split
from protocol.config.run import RunConfig
from tests.support.runs.balance import COUNTS, config_of


def test_the_best_split_of_six_gpus(tiny_config: Callable[..., RunConfig]) -> None:
    sizes, balance = best_split(config_of(tiny_config, actors=5, workers=1), COUNTS, 6)
    assert (sizes, balance.iteration) == ("2 + 4", 600), "3 of 12 shards on lanes 0 and 4, 6 shards on an actor"


def test_bundles_take_turns_on_as_many_gpus_as_the_lanes_allow(tiny_config: Callable[..., RunConfig]) -> None:
    bundles, balance = best_bundles(config_of(tiny_config, actors=5, workers=1, lag=1), COUNTS, 6)
    assert (bundles, balance.iteration) == (4, 300 + 600), "3 of 12 shards for each"
