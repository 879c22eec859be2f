"""Credit rules and advantages against the worked example of docs/method.md: three members, four steps."""

import pytest
import torch

from learner.credit import RULES, gains, uniform
from learner.normalise import NORMALISERS, joint

REWARDS = torch.tensor([[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]])
ALL = torch.ones(3, 5, dtype=torch.bool)
EPSILON = 1e-4


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=2e-5)


def test_uniform_gives_every_step_the_final_reward_and_flow_grpo_s_advantages() -> None:
    values, valid = uniform(REWARDS, ALL, steps=4)
    assert torch.equal(values, REWARDS[:, -1:].expand(3, 4))
    assert valid.all()
    close(joint(values, valid, epsilon=EPSILON), [[1.068189] * 4, [0.267047] * 4, [-1.335236] * 4])


def test_uniform_needs_final_pictures_only() -> None:
    full, short = uniform(REWARDS, ALL, steps=4), uniform(REWARDS[:, -1:], ALL[:, -1:], steps=4)
    assert torch.equal(full[0], short[0])


def test_gains_are_reward_differences_that_telescope() -> None:
    values, valid = gains(REWARDS, ALL, steps=4)
    close(values, [[0.12, -0.04, 0.08, 0.04], [-0.04, 0.09, -0.02, 0.07], [0.07, -0.08, -0.05, -0.04]])
    torch.testing.assert_close(values.sum(1), REWARDS[:, -1] - REWARDS[:, 0])
    assert valid.all()


def test_joint_advantages_of_gains_are_the_worked_ones() -> None:
    advantages = joint(*gains(REWARDS, ALL, steps=4), epsilon=EPSILON)
    close(
        advantages,
        [
            [1.581602, -0.867330, 0.969369, 0.357136],
            [-0.867330, 1.122427, -0.561213, 0.816310],
            [0.816310, -1.479563, -1.020388, -0.867330],
        ],
    )
    torch.testing.assert_close(advantages.sum(1), torch.tensor([2.040776, 0.510194, -2.550970]), rtol=0, atol=5e-5)


def test_without_epsilon_the_first_row_is_the_worked_one() -> None:
    advantages = joint(*gains(REWARDS, ALL, steps=4), epsilon=0.0)
    close(advantages[:1], [[1.584026, -0.868659, 0.970855, 0.357683]])
    assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_three_stochastic_steps_whose_last_point_is_the_final_picture_give_the_worked_advantages() -> None:
    points = REWARDS[:, [0, 1, 2, 4]]
    close(
        joint(*gains(points, ALL[:, :4], steps=3), epsilon=EPSILON),
        [[1.221167, -0.777106, 1.221167], [-0.777106, 0.846491, 0.346922], [0.596707, -1.276675, -1.401567]],
    )


def test_a_missing_score_voids_both_gains_that_touch_it_and_leaves_the_statistics_alone() -> None:
    rewards, valid = REWARDS.clone(), ALL.clone()
    rewards[0, 2], valid[0, 2] = float("nan"), False
    values, step_valid = gains(rewards, valid, steps=4)
    assert step_valid.tolist() == [[True, False, False, True], [True] * 4, [True] * 4]
    advantages = joint(values, step_valid, epsilon=EPSILON)
    kept = torch.tensor([0.12, 0.04, -0.04, 0.09, -0.02, 0.07, 0.07, -0.08, -0.05, -0.04]).double()
    mean, std = kept.mean(), kept.std(correction=0)
    assert advantages[0, 1:3].tolist() == [0.0, 0.0]
    assert advantages[0, 0].item() == pytest.approx(((0.12 - mean) / (std + EPSILON)).item(), abs=2e-5)
    assert torch.isfinite(advantages).all()


def test_a_missing_final_score_voids_the_whole_row_of_uniform_credit() -> None:
    rewards, valid = REWARDS.clone(), ALL.clone()
    rewards[1, -1], valid[1, -1] = float("nan"), False
    advantages = joint(*uniform(rewards, valid, steps=4), epsilon=0.0)
    close(advantages, [[1.0] * 4, [0.0] * 4, [-1.0] * 4])


@pytest.mark.parametrize("level", [0.0, 0.1, 0.7, 1e6])
def test_a_group_in_which_nothing_differs_gets_exactly_zero(level: float) -> None:
    rewards = torch.full((3, 5), level)
    for rule in RULES.values():
        advantages = joint(*rule(rewards, ALL, steps=4), epsilon=0.0)
        assert torch.equal(advantages, torch.zeros(3, 4))


def test_a_group_without_any_score_gets_exactly_zero() -> None:
    nothing = torch.full((3, 5), float("nan"))
    for rule in RULES.values():
        values, valid = rule(nothing, torch.zeros_like(ALL), steps=4)
        assert torch.equal(joint(values, valid, epsilon=EPSILON), torch.zeros(3, 4))


def test_gains_refuse_rewards_of_another_number_of_points() -> None:
    with pytest.raises(ValueError, match="at 5 points, got 1"):
        gains(REWARDS[:, -1:], ALL[:, -1:], steps=4)


def test_the_names_of_the_config_are_the_rules_and_normalisers() -> None:
    from typing import get_args

    from protocol.config_learning import CREDIT_RULES_OF_POINTS, CreditConfig

    fields = CreditConfig.model_fields
    assert set(get_args(fields["rule"].annotation)) == set(RULES)
    assert set(get_args(fields["normalise"].annotation)) == set(NORMALISERS)
    assert set(RULES) >= CREDIT_RULES_OF_POINTS
