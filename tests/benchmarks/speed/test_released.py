"""The loop that the sampler is compared with makes the same images."""

from collections.abc import Callable

import numpy as np

from benchmarks.speed.released import at_once, one_at_a_time, request_of
from flow.models.load import load_backbone
from flow.policy import policy_of
from protocol.config.run import RunConfig
from protocol.messages import Prompt


def test_both_make_the_same_images_and_the_loop_takes_more_evaluations(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(
        credit={"rule": "gains"}, completion={"rule": "schedule", "solver": "euler"}, group={"size": 2, "shard": 2}
    )
    policy = policy_of(load_backbone(config.model), config)
    request = request_of(Prompt(index=0, text="a"), 2)
    whole = at_once(policy, request, config)
    taken, policy.evaluations = policy.evaluations, 0
    single = one_at_a_time(policy, request, config)
    assert whole.shape == single.shape == (2, 4, 16, 16, 3)
    assert np.abs(whole.astype(int) - single).max() <= 1
    assert np.ptp(whole) > 50
    assert (taken, policy.evaluations) == (1 + 2 * 3 + 3 + 2 * (2 + 1), 2 * (4 + 4 + 3 + 2))
