"""Several policies of one frozen model: each has its own adapter, all have the same weights, and the bits of one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flow.models.load import FrozenModel
from flow.policy import build_policy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from tests.support.learning.groups import iterate
from tests.support.worlds.architectures import ARCHITECTURES, model_of

Config = Callable[..., RunConfig]


FEW = ("sd35", "qwen_image_21")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.whole) for name in ARCHITECTURES if name not in FEW)]
)
def test_policies_of_a_frozen_model_share_all_but_their_adapters(
    tiny_config: Config, tmp_path: Path, name: str
) -> None:
    config = tiny_config(model=model_of(name, "bfloat16", tmp_path))
    frozen = FrozenModel(config.model, ["cpu"])
    policies = [build_policy(config, device="cpu"), *(build_policy(config, device="cpu", frozen=frozen) for _ in "12")]
    (_, _), (one, lora), (other, _) = policies
    for parameter in lora.parameters.values():
        parameter.data.normal_()
    held, again = (dict(policy.backbone.transformer.named_parameters()) for policy in (one, other))
    assert {name for name in held if held[name].data_ptr() == again[name].data_ptr()} == {
        name for name in held if "lora_" not in name
    }
    torch.manual_seed(0)
    latents, sigma = torch.randn(2, *one.backbone.latent_shape), torch.tensor([0.9, 0.4])
    plain, changed, own = (
        policy.velocity(latents, sigma, policy.conditioning("a red circle", "")) for policy, _ in policies
    )
    assert torch.equal(own, plain) and not torch.equal(own, changed)


def test_sides_that_share_a_model_learn_what_two_models_learn(tiny_config: Config) -> None:
    config, ends = tiny_config(), []
    for frozen in (None, FrozenModel(config.model, ["cpu"])):
        learner, policy = Learner(config, frozen=frozen), RolloutPolicy(config, frozen=frozen)
        for _ in range(2):  # what a rollout in inference mode leaves behind must not reach the learner
            iterate(learner, policy, config)
        ends.append(learner.adapter().digest)
    assert ends[0] == ends[1]


@pytest.mark.whole
def test_a_compiled_model_may_be_shared(tiny_config: Config) -> None:
    config = tiny_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"compile": "aot_eager"})})
    frozen = FrozenModel(config.model, ["cpu"])
    learner = Learner(config, frozen=frozen)
    assert iterate(learner, RolloutPolicy(config, frozen=frozen), config)["train/first_ratio_deviation"] == 0.0
