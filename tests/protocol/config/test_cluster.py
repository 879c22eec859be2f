"""What an actor of each role reserves."""

import pytest

from deploy.presets import load_config
from protocol.errors import ConfigError

TOY = "toy_geneval"


def test_a_role_reserves_its_resources_and_a_reward_those_of_its_role_unless_it_has_its_own() -> None:
    roles = ["cluster.rollout.resources.rollout=1", "cluster.reward.resources.reward=2", "cluster.reward.cpus=3"]
    config = load_config(TOY, overrides=[*roles, "rewards.geneval.cpus=0", "rewards.geneval.resources.ocr_node=0.5"])
    assert config.cluster.rollout.reserved == {"CPU": 1.0, "GPU": 0.0, "rollout": 1.0}
    assert config.cluster.learner.reserved == {"CPU": 1.0, "GPU": 0.0}
    reward = config.rewards["geneval"]
    assert reward.reserved(config.cluster.reward) == {"CPU": 0.0, "GPU": 0.0, "reward": 2.0, "ocr_node": 0.5}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.rollout.resources.GPU=1", "names of their own, got 'GPU': set cpus or gpus instead"),
        ("rewards.geneval.resources.memory=1", "names of their own, got 'memory'"),
        ("cluster.learner.resources.learner=0", "greater than 0"),
        ("cluster.learner.gpus=1.5", "must be a whole number above 1, got 1.5"),
    ],
)
def test_rays_own_resources_and_amounts_of_nothing_are_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(TOY, overrides=[override])
