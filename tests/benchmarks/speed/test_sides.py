"""The table of both sides counts any preset, whatever its layout."""

from collections.abc import Callable

from benchmarks.speed.sides import resized
from deploy.presets import load_config
from deploy.tools.balance import best_bundles, best_split, gpus_of
from deploy.tools.estimate import estimate
from protocol.config.run import RunConfig


def test_a_preset_whose_sides_share_their_gpus_gets_one_for_each(tiny_config: Callable[..., RunConfig]) -> None:
    counts = estimate(tiny_config()).evaluations
    config = load_config("sd35_pickscore")
    assert config.cluster.is_colocated
    whole = resized(config, actors=7, workers=1)
    assert gpus_of(whole) == 8
    split = best_split(whole, counts)
    assert split is not None and split.actors + split.workers == 8
    assert best_bundles(whole, counts).actors == 8
    assert best_bundles(resized(config, actors=0, workers=1), counts).actors == 1
