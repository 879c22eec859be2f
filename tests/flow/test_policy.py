"""Which steps are stochastic, and what a step is made of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flow.device import torch_threads
from flow.maths.noise import normal
from flow.maths.transition import Start, Transition, cps, dance_sde, ddim_sde, flow_sde
from flow.models.contract import EMBEDS, Backbone, Conditioning
from flow.models.load import load_backbone
from flow.policy import FlowPolicy
from protocol.config.model import ModelConfig
from protocol.config.sampling import SamplingConfig
from protocol.errors import ConfigError


@pytest.fixture(scope="module")
def backbone(tiny_sd3: Path) -> Backbone:
    return load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=2))


def steps(backbone: Backbone, **settings: Any) -> tuple[int, ...]:
    return FlowPolicy(backbone, SamplingConfig(**settings), guidance=1.0).steps


def test_a_shard_s_log_probs_are_those_of_the_learner_s_pieces(backbone: Backbone) -> None:
    """The mean of one row of 65,536 elements is rounded in another way on two threads than that of two such rows."""
    mean, value = (normal(name, shape=(5, 4, 128, 128)) for name in ("mean", "value"))
    transition = Transition(mean=mean, std=torch.full((5,), 0.3))
    cuts = {(1, 1): (0, 1, 2, 3, 4, 5), (1, 2): (0, 2, 4, 5), (2, 1): (0, 1, 3, 5), (None, 1): (0, 5)}
    with torch_threads(2):
        for (forward_batch, rows_per_state), cut in cuts.items():
            policy = FlowPolicy(backbone, SamplingConfig(), guidance=1.0, forward_batch=forward_batch)
            whole = policy.log_prob(transition, value, rows_per_state=rows_per_state)
            for rows in map(slice, cut, cut[1:]):
                piece = Transition(mean=mean[rows], std=transition.std[rows])
                assert torch.equal(whole[rows], piece.log_prob(value[rows]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, range(9)),
        ({"std_min": 0.0}, range(9)),
        ({"std_min": 0.3}, range(7)),
        ({"kernel": "ddim_sde"}, range(8)),
        ({"kernel": "cps"}, range(8)),
        ({"kernel": "dance_sde", "noise_level": 0.3}, range(9)),
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


def test_merging_gives_e_grpo_s_released_steps(backbone: Backbone) -> None:
    """Its table for 16 steps shifted by 3 and noise 0.7: steps 0, 1, 2 to 3, 4 to 6."""
    config = SamplingConfig(steps=16, schedule="shifted", merge_std=0.6)
    policy = FlowPolicy(backbone, config, guidance=1.0)
    assert {k: policy.span(k) for k in policy.steps if k < 7} == {0: 1, 1: 1, 2: 2, 4: 3}
    assert max(k + policy.span(k) for k in policy.steps) < 16, "the last step stays an ODE step"
    plain = FlowPolicy(backbone, SamplingConfig(steps=16, schedule="shifted"), guidance=1.0)
    assert plain.std(2) == pytest.approx(0.7 * (21 * (21 / 22 - 13 / 14)) ** 0.5, rel=1e-4), "sigma 21/22 to 13/14"
    assert policy.std(2) == pytest.approx(0.7 * (21 * (21 / 22 - 0.9)) ** 0.5, rel=1e-4), "to sigma 0.9"
    assert policy.step_size(2) == pytest.approx(21 / 22 - 0.9, rel=1e-5)
    assert {plain.span(k) for k in range(16)} == {1}


def test_a_merged_step_is_the_kernel_over_all_it_crosses(backbone: Backbone) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(steps=6, schedule="linear", merge_std=0.5), guidance=1.0)
    assert {k: policy.span(k) for k in policy.steps} == {0: 1, 1: 1, 2: 2}
    latents, conditioning = normal("x", shape=(2, 4, 8, 8)), policy.conditioning("a", "")
    with torch.no_grad():
        merged, velocity = policy.transition(latents, 2, conditioning=conditioning)
        quiet, _ = policy.transition(latents, 2, conditioning=conditioning, as_ode=True)
    sigmas = policy.sigmas[2].repeat(2), policy.sigmas[4].repeat(2)
    expected = flow_sde(Start(latents, velocity, *sigmas), sigma_first=5 / 6, noise_level=0.7)
    torch.testing.assert_close(merged.mean, expected.mean)
    assert merged.std.tolist() == pytest.approx([0.7 * (2 / 3) ** 0.5] * 2, rel=1e-5), "a sqrt(t / (1 - t)) sqrt(1/3)"
    torch.testing.assert_close(quiet.mean, latents - velocity / 6)


@pytest.mark.parametrize("settings", [{"std_min": 5.0}, {"steps": 2, "kernel": "ddim_sde", "first_step": "exclude"}])
def test_a_schedule_without_a_stochastic_step_is_refused(backbone: Backbone, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="std_min"):
        steps(backbone, **settings)


def test_the_linear_schedule_replaces_the_family_s(backbone: Backbone) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(steps=4, schedule="linear"), guidance=1.0)
    assert policy.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert policy.total_steps == 4


@pytest.mark.parametrize(
    ("name", "kernel"), [("flow_sde", flow_sde), ("ddim_sde", ddim_sde), ("dance_sde", dance_sde), ("cps", cps)]
)
def test_a_step_is_the_configured_kernel_on_the_policy_s_velocity(backbone: Backbone, name: Any, kernel: Any) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(kernel=name, noise_level=0.5), guidance=1.0)
    latents, conditioning = normal("x", shape=(3, 4, 8, 8)), policy.conditioning("a red circle", "")
    for k in (0, 4):
        with torch.no_grad():
            transition, velocity = policy.transition(latents, k, conditioning=conditioning)
        sigma, sigma_next = policy.sigmas[k].repeat(3), policy.sigmas[k + 1].repeat(3)
        assert torch.equal(
            velocity,
            backbone.velocity(latents, sigma, conditioning[0].repeat(3)),
        )
        expected = kernel(
            Start(latents, velocity, sigma, sigma_next),
            noise_level=0.5,
            **({"sigma_first": policy.sigmas[1].item()} if name in ("flow_sde", "ddim_sde") else {}),
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
    many = tuple(each.repeat(2) for each in one)
    with torch.no_grad():
        assert torch.equal(policy.velocity(latents, sigma, one), policy.velocity(latents, sigma, many))


def test_a_table_of_noise_levels_gives_each_step_its_own(backbone: Backbone) -> None:
    levels = (0.9, 0.5, 0.3)
    policy = FlowPolicy(
        backbone, SamplingConfig(steps=4, schedule="linear", kernel="dance_sde", noise_levels=levels), guidance=1.0
    )
    assert [policy.std(k) for k in range(3)] == pytest.approx([level * 0.5 for level in levels])


def test_the_published_log_prob_of_cps_is_a_choice_of_the_config(backbone: Backbone) -> None:
    latents = normal("x", shape=(2, 4, 8, 8))
    for form in ("gaussian", "squared"):
        policy = FlowPolicy(backbone, SamplingConfig(kernel="cps", log_prob=form), guidance=1.0)  # type: ignore[arg-type]
        with torch.no_grad():
            transition, _ = policy.transition(latents, 2, conditioning=policy.conditioning("a", ""))
        assert transition.log_prob_form == form


def test_a_step_taken_as_ode_has_no_noise(backbone: Backbone) -> None:
    policy = FlowPolicy(backbone, SamplingConfig(), guidance=1.0)
    latents, conditioning = normal("x", shape=(2, 4, 8, 8)), policy.conditioning("a", "")
    with torch.no_grad():
        quiet, velocity = policy.transition(latents, 3, conditioning=conditioning, as_ode=True)
    assert quiet.std.tolist() == [0.0, 0.0]
    assert torch.equal(quiet.mean, latents - (policy.sigmas[3] - policy.sigmas[4]) * velocity)


def test_a_window_without_a_stochastic_step_is_refused_when_the_policy_is_made(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="sampling.window must always hold a stochastic step"):
        steps(backbone, kernel="ddim_sde", window={"rule": "fixed", "first": 8, "size": 2})


def test_a_shared_state_s_gradient_is_the_sum_worked_by_hand(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/method/kernels.md: two members with noise 0.8 and -0.2 and advantages 1 and -1."""
    policy = FlowPolicy(backbone, SamplingConfig(steps=10, schedule="linear"), guidance=1.0)
    velocity = torch.full((1, 1, 1, 1), 1.0, requires_grad=True)
    monkeypatch.setattr(policy, "velocity", lambda latents, sigma, conditioning: velocity.expand(len(latents), 1, 1, 1))
    transition, shared = policy.transition(torch.full((2, 1, 1, 1), 0.3), 5, conditioning=(), rows_per_state=2)
    assert shared.shape == (2, 1, 1, 1)
    noise = torch.tensor([0.8, -0.2]).view(2, 1, 1, 1)
    log_prob = transition.log_prob(transition.sample(noise).detach())
    assert transition.std.tolist() == pytest.approx([0.221359, 0.221359], abs=1e-6)
    (-torch.tensor([1.0, -1.0]) * (log_prob - log_prob.detach()).exp()).sum().backward()
    assert velocity.grad is not None
    assert velocity.grad.item() == pytest.approx(0.562433, abs=1e-5)


class Lengths:
    """A backbone whose velocity is the length of each row's prompt, and which keeps the lengths of its forwards."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, ...]] = []

    def sigmas(self, steps: int) -> torch.Tensor:
        return torch.linspace(1, 0, steps + 1)

    def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        self.forwards.append(conditioning.lengths)
        return torch.ones_like(latents) * torch.tensor(conditioning.lengths).view(-1, 1, 1, 1) * sigma.view(-1, 1, 1, 1)

    def guide(self, without: torch.Tensor, toward: torch.Tensor, weight: float) -> torch.Tensor:
        return without + weight * (toward - without)


@pytest.mark.parametrize(
    ("splits", "lengths", "forwards"),
    [(False, (1, 3), [(1, 1, 3, 3)]), (True, (1, 3), [(1, 1), (3, 3)]), (True, (3, 3), [(3, 3, 3, 3)])],
)
def test_branches_of_different_length_take_a_forward_each_if_wanted(
    splits: bool, lengths: tuple[int, int], forwards: list[tuple[int, ...]]
) -> None:
    backbone: Any = Lengths()
    policy = FlowPolicy(backbone, SamplingConfig(schedule="model"), guidance=2.0, splits_guidance=splits)
    rows = tuple(Conditioning.of({EMBEDS: torch.zeros(1, length, 2)}) for length in lengths)
    velocity = policy.velocity(torch.zeros(2, 1, 1, 1), torch.full((2,), 0.5), rows)
    assert velocity.flatten().tolist() == [0.5 * (2 * lengths[1] - lengths[0])] * 2
    assert backbone.forwards == forwards
    assert policy.evaluations == 4
