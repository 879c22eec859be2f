"""What an evaluation's actors reserve."""

from collections.abc import Callable

from deploy.tools.evaluators import without_learner
from protocol.config.run import RunConfig


def test_an_evaluation_keeps_the_gpus_on_which_a_joint_process_has_its_model(
    tiny_config: Callable[..., RunConfig],
) -> None:
    sides = {"rollout": {"gpus": 1}, "learner": {"gpus": 1}, "rollout_actors": 1}
    found = [
        without_learner(tiny_config(cluster={**sides, "layout": layout})).reserved["GPU"]
        for layout in ("separate", "joint")
    ]
    assert found == [1, 2]
