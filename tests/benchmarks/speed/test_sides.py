"""The table of both sides counts any preset, whatever its layout."""

from benchmarks.speed.sides import resized
from deploy.presets import load_config
from deploy.tools.balance import best_bundles, best_split, gpus_of
from deploy.tools.estimate import Evaluations

COUNTS = Evaluations(
    trajectories=96,
    rollout=1200,
    images=0,
    pairs=0,
    learner=2400,
    gradient_rows=1,
    forward_flops=2e12,
    gradient_flops=4e12,
)


def test_a_preset_whose_sides_share_their_gpus_gets_one_for_each() -> None:
    config = load_config("sd35_pickscore")
    assert config.cluster.is_colocated
    whole = resized(config, actors=7, workers=1)
    assert gpus_of(whole) == 8
    split = best_split(whole, COUNTS)
    assert split is not None and split.actors + split.workers == 8
    assert best_bundles(whole, COUNTS).actors == 8
    assert best_bundles(resized(config, actors=0, workers=1), COUNTS).actors == 1
