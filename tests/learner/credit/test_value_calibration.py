"""Calibrated values: slopes, the values they make, masks, windows, and what remains true of the gains."""

import numpy as np
import pytest
import torch

from learner.credit.normalisers import centred, joint
from learner.credit.rules import calibrated, gains

REWARDS = torch.tensor([[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]])


def widened(rewards: torch.Tensor, *steps: int, total: int) -> torch.Tensor:
    """Rewards [N, S+1] of points before these steps in the columns of a schedule, with NaN elsewhere."""
    table = torch.full((len(rewards), total + 1), torch.nan)
    table[:, [*steps, total]] = rewards
    return table


def test_worked_example() -> None:
    """Columns' leads and the finals' (.133333 .033333 -.166667): .07 -.09 .02 give .003/.0134, the last two over 1."""
    (values,), slopes = calibrated(widened(REWARDS, 0, 1, 2, 3, total=5)[None])
    assert slopes[:4].tolist() == pytest.approx([0, 0.223881, 1, 1], abs=1e-6)
    assert torch.isnan(slopes[4])
    values = values[:, [0, 1, 2, 3, 5]]
    assert values[0].tolist() == pytest.approx([0, 0.015672, 0.04, 0.116667, 0.133333], abs=1e-6)
    assert values[2].tolist() == pytest.approx([0, 0.004478, -0.05, -0.103333, -0.166667], abs=1e-6)
    step_rewards = gains(values)
    assert step_rewards[1].tolist() == pytest.approx([-0.020149, 0.030149, -0.023333, 0.046667], abs=1e-6)
    advantages = joint(step_rewards, epsilon=1e-4)
    assert advantages[0].tolist() == pytest.approx([0.3749, 0.5819, 1.8338, 0.3987], abs=1e-4)


def test_gains_sum_to_the_lead_of_the_finished_image_where_the_first_point_is_shared() -> None:
    (values,), _ = calibrated(REWARDS[None])
    sums = gains(values).sum(1)
    assert torch.allclose(sums, REWARDS[:, -1] - REWARDS[:, -1].mean())


def test_where_slopes_are_one_centred_gains_are_the_plain_ones() -> None:
    (values,), _ = calibrated(REWARDS[None])
    plain, own = (centred(gains(table[:, 2:]), epsilon=0) for table in (REWARDS, values))
    assert torch.allclose(plain, own, atol=1e-5)


def test_a_point_that_says_nothing_or_lies_has_no_say() -> None:
    """Column 0 is the same for all, column 1 falls as the finals rise."""
    rewards = torch.tensor([[0.5, 0.9, 0.1], [0.5, 0.5, 0.5], [0.5, 0.1, 0.9]])
    (values,), slopes = calibrated(rewards[None])
    assert slopes.tolist() == [0, 0]
    step_rewards = gains(values)
    assert not step_rewards[:, 0].any()
    assert step_rewards[:, 1].tolist() == pytest.approx([-0.4, 0, 0.4], abs=1e-6)


def test_slopes_are_those_of_all_groups_and_do_not_know_a_group_s_level() -> None:
    generator = np.random.default_rng(3)
    points = torch.tensor(generator.normal(size=(40, 1)), dtype=torch.float32)
    final = 0.6 * points + torch.tensor(generator.normal(size=(40, 1)), dtype=torch.float32)
    both = torch.cat([points, final], dim=1)
    _, one = calibrated(both[None])
    assert one[0] == pytest.approx(np.polyfit(points[:, 0], final[:, 0], 1)[0], abs=1e-6)
    _, twice = calibrated(torch.stack([both, both + 5]))
    assert torch.allclose(one, twice)


def test_missing_scores_count_nowhere() -> None:
    rewards = REWARDS.clone()
    rewards[0, 2] = torch.nan
    (values,), slopes = calibrated(rewards[None])
    assert torch.equal(values.isnan(), rewards.isnan())
    assert slopes[2] == pytest.approx(1)
    assert values[1:, 2].tolist() == pytest.approx([0.03, -0.03], abs=1e-6)
    (nothing, values), slopes = calibrated(torch.stack([torch.full_like(REWARDS, torch.nan), REWARDS]))
    assert torch.isnan(nothing).all()
    assert torch.isfinite(values).all()
    assert torch.isfinite(slopes).all()


def test_a_group_without_differences_has_values_of_exactly_0() -> None:
    same = torch.full((24, 5), 0.1)
    (_, values), _ = calibrated(torch.stack([REWARDS.repeat(8, 1), same]))
    assert not values.any()


def test_windows_meet_at_their_own_step() -> None:
    early, late = widened(REWARDS[:, :3], 0, 1, total=6), widened(REWARDS[:, 2:], 3, 4, total=6)
    (_, values), slopes = calibrated(torch.stack([early, late]))
    assert torch.isnan(slopes[[2, 5]]).all()
    ((alone,), _) = calibrated(late[None])
    assert torch.equal(values.nan_to_num(), alone.nan_to_num())
    assert torch.equal(values.isnan(), late.isnan())
