"""Calibrated values: slopes, the values they make, masks, windows, and what remains true of the gains."""

import numpy as np
import pytest
import torch

from learner.credit.normalise import centred, joint
from learner.credit.rules import gains
from learner.credit.value_calibration import calibrated

REWARDS = torch.tensor([[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]])
VALID = torch.ones(3, 5, dtype=torch.bool)
STEPS = (0, 1, 2, 3)


def test_worked_example() -> None:
    """Columns' leads and the finals' (.133333 .033333 -.166667): .07 -.09 .02 give .003/.0134, the last two over 1."""
    ((values,),), slopes = calibrated([[(REWARDS, VALID, STEPS)]], 5)
    assert slopes[:4].tolist() == pytest.approx([0, 0.223881, 1, 1], abs=1e-6)
    assert torch.isnan(slopes[4])
    assert values[0].tolist() == pytest.approx([0, 0.015672, 0.04, 0.116667, 0.133333], abs=1e-6)
    assert values[2].tolist() == pytest.approx([0, 0.004478, -0.05, -0.103333, -0.166667], abs=1e-6)
    step_rewards, _ = gains(values, VALID, steps=4)
    assert step_rewards[1].tolist() == pytest.approx([-0.020149, 0.030149, -0.023333, 0.046667], abs=1e-6)
    advantages = joint(step_rewards, VALID[:, 1:], epsilon=1e-4)
    assert advantages[0].tolist() == pytest.approx([0.3749, 0.5819, 1.8338, 0.3987], abs=1e-4)


def test_gains_sum_to_the_lead_of_the_finished_image_where_the_first_point_is_shared() -> None:
    ((values,),), _ = calibrated([[(REWARDS, VALID, STEPS)]], 4)
    sums = gains(values, VALID, steps=4)[0].sum(1)
    assert torch.allclose(sums, REWARDS[:, -1] - REWARDS[:, -1].mean())


def test_where_slopes_are_one_centred_gains_are_the_plain_ones() -> None:
    ((values,),), _ = calibrated([[(REWARDS, VALID, STEPS)]], 4)
    plain, own = (centred(*gains(table[:, 2:], VALID[:, 2:], steps=2), epsilon=0) for table in (REWARDS, values))
    assert torch.allclose(plain, own, atol=1e-5)


def test_a_point_that_says_nothing_or_lies_has_no_say() -> None:
    """Column 0 is the same for all, column 1 falls as the finals rise."""
    rewards = torch.tensor([[0.5, 0.9, 0.1], [0.5, 0.5, 0.5], [0.5, 0.1, 0.9]])
    valid = torch.ones(3, 3, dtype=torch.bool)
    ((values,),), slopes = calibrated([[(rewards, valid, (0, 1))]], 2)
    assert slopes.tolist() == [0, 0]
    step_rewards, _ = gains(values, valid, steps=2)
    assert not step_rewards[:, 0].any()
    assert step_rewards[:, 1].tolist() == pytest.approx([-0.4, 0, 0.4], abs=1e-6)


def test_slopes_are_those_of_all_groups_and_do_not_know_a_group_s_level() -> None:
    generator = np.random.default_rng(3)
    points = torch.tensor(generator.normal(size=(40, 1)), dtype=torch.float32)
    final = 0.6 * points + torch.tensor(generator.normal(size=(40, 1)), dtype=torch.float32)
    both, valid = torch.cat([points, final], dim=1), torch.ones(40, 2, dtype=torch.bool)
    _, one = calibrated([[(both, valid, (0,))]], 1)
    assert one[0] == pytest.approx(np.polyfit(points[:, 0], final[:, 0], 1)[0], abs=1e-6)
    _, twice = calibrated([[(both, valid, (0,))], [(both + 5, valid, (0,))]], 1)
    assert torch.allclose(one, twice)


def test_shards_of_a_group_are_one_group() -> None:
    whole, slopes = calibrated([[(REWARDS, VALID, STEPS)]], 4)
    parts, own = calibrated([[(REWARDS[:1], VALID[:1], STEPS), (REWARDS[1:], VALID[1:], STEPS)]], 4)
    assert torch.equal(slopes, own)
    assert torch.equal(whole[0][0], torch.cat(parts[0]))


def test_missing_scores_count_nowhere() -> None:
    rewards, valid = REWARDS.clone(), VALID.clone()
    rewards[0, 2], valid[0, 2] = torch.nan, False
    ((values,),), slopes = calibrated([[(rewards, valid, STEPS)]], 4)
    assert torch.isnan(values[0, 2])
    assert torch.isfinite(values[valid]).all()
    assert slopes[2] == pytest.approx(1)
    assert values[1:, 2].tolist() == pytest.approx([0.03, -0.03], abs=1e-6)
    silent = torch.zeros(3, 5, dtype=torch.bool)
    ((nothing,), (values,)), slopes = calibrated([[(rewards, silent, STEPS)], [(REWARDS, VALID, STEPS)]], 4)
    assert torch.isnan(nothing).all()
    assert torch.isfinite(values).all()
    assert torch.isfinite(slopes).all()


def test_a_group_without_differences_has_values_of_exactly_0() -> None:
    same = torch.full((24, 5), 0.1)
    (_, (values,)), _ = calibrated([[(REWARDS, VALID, STEPS)], [(same, torch.ones_like(same) > 0, STEPS)]], 4)
    assert not values.any()


def test_windows_meet_at_their_own_step() -> None:
    early, late = (REWARDS[:, :3], VALID[:, :3], (0, 1)), (REWARDS[:, 2:], VALID[:, 2:], (3, 4))
    (_, (values,)), slopes = calibrated([[early], [late]], 6)
    assert torch.isnan(slopes[[2, 5]]).all()
    alone = calibrated([[late]], 6)[0][0][0]
    assert torch.equal(values, alone)
