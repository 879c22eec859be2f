"""The presets that ship: each is a valid config, and holds what its papers state."""

import pytest

from deploy.presets import find_preset, preset_names
from flow.models.families import FLUX, SD3
from protocol.config.load import load_config
from protocol.config.run import RunConfig
from protocol.prompts import read_prompts

REAL = ("flux_pickscore", "sd35_geneval", "sd35_ocr", "sd35_pickscore")


def preset(name: str) -> RunConfig:
    return load_config(find_preset(name))


def test_every_preset_is_a_valid_config() -> None:
    assert set(REAL) | {"toy_geneval"} <= set(preset_names())
    for name in preset_names():
        assert isinstance(preset(name), RunConfig)


@pytest.mark.parametrize("name", REAL)
def test_real_models_follow_the_papers(name: str) -> None:
    config = preset(name)
    assert (config.sampling.kernel, config.sampling.noise_level, config.sampling.shared_noise) == (
        "ddim_sde",
        0.7,
        True,
    )
    assert (config.completion.rule, config.completion.substeps) == ("ode", 5)
    assert (config.credit.rule, config.credit.normalise) == ("gains", "joint")
    assert (config.group.size, config.group.per_iteration) == (24, 48)
    learner = config.learner
    assert (learner.learning_rate, learner.clip_range, learner.updates_per_iteration) == (3e-4, 1e-4, 2)
    assert (learner.average.decay, learner.average.every) == (0.9, 8)
    assert (learner.kl.weight, learner.kl.rule) == (0.004, "full")
    assert (config.model.height, config.model.width) == (512, 512)
    assert config.evaluation.adapter == "average"
    assert config.model.embedding_cache
    family = FLUX if name.startswith("flux") else SD3
    adapter = family.adapter(config.model.lora)
    assert (adapter.rank, adapter.alpha, adapter.targets) == (family.rank, family.alpha, family.targets)


@pytest.mark.parametrize("name", REAL)
def test_their_prompts_ship_and_eight_gpus_are_enough(name: str) -> None:
    config = preset(name)
    for path in (config.data.train, config.data.heldout):
        assert len(read_prompts(config.data, path)) >= 10
    cluster = config.cluster
    judges = sum(reward.actors * (reward.gpus or cluster.reward.gpus) for reward in config.rewards.values())
    assert cluster.rollout_actors * cluster.rollout.gpus + judges + cluster.learner.gpus == 8


def test_what_differs_between_them() -> None:
    sd35, flux = preset("sd35_pickscore"), preset("flux_pickscore")
    assert (sd35.sampling.steps, sd35.model.guidance, sd35.evaluation.steps) == (10, 4.5, 40)
    assert (flux.sampling.steps, flux.model.guidance, flux.model.embedded_guidance) == (6, 1.0, 3.5)
    assert flux.evaluation.steps == 28
    assert {name: reward.weight for name, reward in preset("sd35_ocr").rewards.items()} == {
        "ocr": 0.8,
        "pickscore": 0.2,
    }
