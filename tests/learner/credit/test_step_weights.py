"""Weights of the steps against worked numbers."""

import pytest
import torch

from flow.maths.schedule import sd3_sigmas
from flow.maths.transition import Start, flow_sde
from learner.credit.normalisers import joint
from learner.credit.rules import gains, uniform
from learner.credit.step_weights import step_weights
from protocol.config.credit import StepWeightConfig
from protocol.errors import ConfigError
from tests.support.learning.worked_group import REWARDS


def piecewise(total: int, **choice: object) -> torch.Tensor:
    return step_weights(StepWeightConfig(rule="piecewise", **choice), total=total, stds={})  # type: ignore[arg-type]


def test_with_ten_steps_three_are_early_and_two_late() -> None:
    assert piecewise(10).tolist() == pytest.approx([1.8, 1.8, 1.8, 1, 1, 1, 1, 1, 1.3, 1.3])


def test_with_four_steps_the_late_weight_falls_on_none() -> None:
    assert piecewise(4).tolist() == pytest.approx([1.8, 1, 1, 1])


def test_weighted_advantages_are_the_worked_ones() -> None:
    weights = piecewise(4)
    flat = joint(uniform(REWARDS), epsilon=1e-4) * weights
    assert flat[0].tolist() == pytest.approx([1.922739, 1.068189, 1.068189, 1.068189], abs=6e-7)
    assert flat[2].tolist() == pytest.approx([-2.403424, -1.335236, -1.335236, -1.335236], abs=6e-7)
    stepwise = joint(gains(REWARDS), epsilon=1e-4) * weights
    assert stepwise[:, 0].tolist() == pytest.approx([2.846883, -1.561194, 1.469359], abs=6e-7)


def flow_stds(sigmas: torch.Tensor, steps: int) -> dict[int, float]:
    nothing = torch.zeros(steps, 1)
    start = Start(nothing, nothing, sigmas[:steps], sigmas[1 : steps + 1])
    return dict(enumerate(flow_sde(start, sigma_first=sigmas[1].item(), noise_level=0.7).std.tolist()))


def test_temp_flow_s_weights_on_the_ten_step_sd3_schedule_are_the_worked_ones() -> None:
    stds = flow_stds(sd3_sigmas(steps=10), 9)
    weights = step_weights(StepWeightConfig(rule="noise", noise_power=1.0), total=10, stds=stds)
    expected = [1.576560, 1.673325, 1.207537, 1.004262, 0.882410, 0.794580, 0.718619, 0.635144, 0.507563, 0.0]
    assert weights.tolist() == pytest.approx(expected, abs=2e-6)


def test_temp_flow_s_weights_on_the_toy_grid_are_the_worked_ones() -> None:
    stds = flow_stds(torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0]), 4)
    weights = step_weights(StepWeightConfig(rule="noise", noise_power=1.0), total=4, stds=stds)
    assert weights.tolist() == pytest.approx([1.368075, 1.223644, 0.917733, 0.490549], abs=2e-6)
    advantages = joint(uniform(REWARDS), epsilon=1e-4) * weights
    assert advantages[0].tolist() == pytest.approx([1.461362, 1.307082, 0.980311, 0.523999], abs=6e-7)


def test_the_second_power_takes_back_the_log_prob_s_variance() -> None:
    stds = flow_stds(torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0]), 4)
    weights = step_weights(StepWeightConfig(rule="noise", noise_power=2.0), total=4, stds=stds)
    # s^2 = 0.49 sigma / (1 - sigma) h = 0.49 (1, 0.8, 0.45, 0.128571); their mean is 0.49 * 0.594643
    assert weights.tolist() == pytest.approx([1.681682, 1.345345, 0.756757, 0.216216], abs=2e-6)
    del stds[3]  # as in a run: the last step is never stochastic
    weights = step_weights(StepWeightConfig(rule="noise", noise_power=2.0), total=4, stds=stds)
    assert weights.tolist() == pytest.approx([4 / 3, 16 / 15, 0.6, 0.0], abs=2e-6)


def test_temp_flow_s_released_constant_keeps_the_size_of_the_noise() -> None:
    stds = flow_stds(torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0]), 4)
    weights = step_weights(StepWeightConfig(rule="noise", noise_power=1.0, noise_constant=2.25), total=4, stds=stds)
    # 2.25 * 0.7 * sqrt(sigma / (1 - sigma) * h), where the first step divides by 1 - 0.8
    assert weights.tolist() == pytest.approx([1.575, 1.408722, 1.056542, 0.564745], abs=2e-6)


def test_a_table_is_taken_as_it_is() -> None:
    weights = step_weights(StepWeightConfig(rule="table", table=(0.5, 0.0, 2.0)), total=3, stds={})
    assert weights.tolist() == [0.5, 0.0, 2.0]


def test_weights_that_train_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="must have early, middle or late above 0, got 0 for all"):
        StepWeightConfig(rule="piecewise", early=0, middle=0, late=0)
    refused = r"above 0 for a step that is trained, one of \[0, 1\], got .* raise one"
    with pytest.raises(ConfigError, match=refused):
        step_weights(StepWeightConfig(rule="table", table=(0.0, 0.0, 1.0)), total=3, stds={0: 0.5, 1: 0.4})
    late, stds = StepWeightConfig(rule="table", table=(0.0, 0.0, 1.0, 1.0)), {0: 0.5, 1: 0.4, 2: 0.3}
    with pytest.raises(ConfigError, match=refused):
        step_weights(late, total=4, stds=stds, trained=(0, 1))
    assert step_weights(late, total=4, stds=stds, trained=(1, 2)).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("stds", [{0: 0.3, 1: 0.2}, {0: 3.0, 1: 0.2}])
@pytest.mark.parametrize("constant", [None, 2.25])
def test_a_power_that_no_float_holds_is_refused(stds: dict[int, float], constant: float | None) -> None:
    config = StepWeightConfig(rule="noise", noise_power=2000, noise_constant=constant)
    with pytest.raises(ConfigError, match=r"noise_power must give numbers that a float holds, got 2000"):
        step_weights(config, total=3, stds=stds)
