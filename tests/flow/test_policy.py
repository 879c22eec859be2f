"""Which steps are stochastic, and what a step is made of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flow.backbone import Backbone, load_backbone
from flow.noise import normal
from flow.policy import FlowPolicy
from flow.transition import ddim_sde, flow_sde
from protocol.config_policy import ModelConfig, SamplingConfig
from protocol.errors import ConfigError


@pytest.fixture(scope="module")
def backbone(tiny_sd3: Path) -> Backbone:
    return load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=2))


def steps(backbone: Backbone, **settings: Any) -> tuple[int, ...]:
    return FlowPolicy(backbone, SamplingConfig(**settings), guidance=1.0).steps


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, range(9)),
        ({"std_min": 0.0}, range(9)),
        ({"std_min": 0.3}, range(7)),
        ({"kernel": "ddim_sde"}, range(8)),
        ({"kernel": "ddim_sde", "std_min": 0.0}, range(9)),
        ({"kernel": "ddim_sde", "first_step": "exclude"}, range(1, 8)),
        ({"kernel": "ddim_sde", "first_step": "exclude", "std_min": 0.0}, range(1, 9)),
        ({"steps": 2}, range(1)),
        ({"steps": 4, "schedule": "linear"}, range(3)),
    ],
)
def test_stochastic_steps_have_enough_std_and_never_include_the_last(
    backbone: Backbone, settings: dict[str, Any], expected: range
) -> None:
    assert steps(backbone, **settings) == tuple(expected)


@pytest.mark.parametrize("settings", [{"std_min": 5.0}, {"steps": 2, "kernel": "ddim_sde", "first_step": "exclude"}])
def test_a_schedule_without_a_stochastic_step_is_refused(backbone: Backbone, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="std_min"):
        steps(backbone, **settings)


def test_the_linear_schedule_replaces_the_family_s(backbone: Backbone) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(steps=4, schedule="linear"), guidance=1.0)
    assert policy.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert policy.total_steps == 4


@pytest.mark.parametrize(("name", "kernel"), [("flow_sde", flow_sde), ("ddim_sde", ddim_sde)])
def test_a_step_is_the_configured_kernel_on_the_policy_s_velocity(backbone: Backbone, name: Any, kernel: Any) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(kernel=name, noise_level=0.5), guidance=1.0)
    latents, conditioning = normal("x", shape=(3, 4, 8, 8)), policy.conditioning("a red circle", "")
    for k in (0, 4):
        with torch.no_grad():
            transition, velocity = policy.transition(latents, k, conditioning=conditioning)
        sigma, sigma_next = policy.sigmas[k].repeat(3), policy.sigmas[k + 1].repeat(3)
        assert torch.equal(
            velocity,
            backbone.velocity(latents, sigma, {n: t.repeat_interleave(3, 0) for n, t in conditioning[0].items()}),
        )
        expected = kernel(
            latents=latents,
            velocity=velocity,
            sigma=sigma,
            sigma_next=sigma_next,
            sigma_first=policy.sigmas[1].item(),
            noise_level=0.5,
        )
        assert torch.equal(transition.mean, expected.mean)
        assert torch.equal(transition.std, expected.std)


def test_a_step_that_is_not_stochastic_is_the_ode_s(backbone: Backbone) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(), guidance=1.0)
    latents = normal("x", shape=(2, 4, 8, 8))
    with torch.no_grad():
        transition, velocity = policy.transition(latents, 9, conditioning=policy.conditioning("a", ""))
    assert transition.std.tolist() == [0.0, 0.0]
    assert torch.equal(transition.mean, latents - policy.sigmas[9] * velocity)


def test_rows_for_each_sample_equal_one_row_for_all(backbone: Backbone) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(), guidance=3.0)
    latents, sigma = normal("x", shape=(2, 4, 8, 8)), torch.tensor([0.3, 0.8])
    one = policy.conditioning("a red circle", "blue")
    many = tuple({name: tensor.repeat_interleave(2, 0) for name, tensor in each.items()} for each in one)
    with torch.no_grad():
        assert torch.equal(policy.velocity(latents, sigma, one), policy.velocity(latents, sigma, many))
