"""Credit rules and advantages against the worked example of docs/method/: three members, four steps."""

from functools import partial
from typing import get_args

import pytest
import torch

from learner.credit.normalisers import (
    NORMALISERS,
    Normaliser,
    centred,
    from_baseline,
    joint,
    per_step,
    updated_baseline,
)
from learner.credit.rules import calibrated_tree, gae, gains, tree, uniform
from learner.credit.tables import lineage
from protocol.config.credit import CreditConfig
from tests.support.learning.worked_group import REWARDS

EPSILON = 1e-4
RULES = {"uniform": uniform, "gains": gains, "gae": partial(gae, decay=0.9)}


def close(actual: torch.Tensor, expected: list[list[float]], *, atol: float = 6e-7) -> None:
    """Equal to six decimals; half a unit of the last one, and what float32 advantages round."""
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def own_gains() -> torch.Tensor:
    return gains(REWARDS)


def test_uniform_gives_every_step_the_final_reward_and_flow_grpo_s_advantages() -> None:
    values = uniform(REWARDS)
    assert torch.equal(values, REWARDS[:, -1:].expand(3, 4))
    close(joint(values, epsilon=EPSILON), [[1.068189] * 4, [0.267047] * 4, [-1.335236] * 4])


def test_uniform_needs_final_images_only() -> None:
    finals = REWARDS.clone()
    finals[:, :-1] = torch.nan
    assert torch.equal(uniform(REWARDS), uniform(finals))


def test_gains_are_reward_differences_that_telescope() -> None:
    values = gains(REWARDS)
    close(values, [[0.12, -0.04, 0.08, 0.04], [-0.04, 0.09, -0.02, 0.07], [0.07, -0.08, -0.05, -0.04]])
    torch.testing.assert_close(values.sum(1), REWARDS[:, -1] - REWARDS[:, 0])


def test_joint_advantages_of_gains_are_the_worked_ones() -> None:
    advantages = joint(gains(REWARDS), epsilon=EPSILON)
    close(
        advantages,
        [
            [1.581602, -0.867330, 0.969369, 0.357136],
            [-0.867330, 1.122427, -0.561213, 0.816310],
            [0.816310, -1.479563, -1.020388, -0.867330],
        ],
    )
    close(advantages.double().sum(1, keepdim=True), [[2.040776], [0.510194], [-2.550970]])


@pytest.mark.parametrize("normalise", [joint, per_step, centred])
def test_rewards_as_scorers_give_them_make_float32_advantages_of_the_same_numbers(normalise: Normaliser) -> None:
    exact = normalise(own_gains(), epsilon=EPSILON)
    advantages = normalise(gains(REWARDS.float()), epsilon=EPSILON)
    assert exact.dtype == advantages.dtype == torch.float32
    close(advantages, exact.tolist(), atol=2e-6)


def test_the_mean_and_the_std_of_all_gains_are_the_worked_ones() -> None:
    """Without epsilon the advantages are (g - m) / s, from which both are read back."""
    values = own_gains()
    advantages = joint(values, epsilon=0.0).double()
    std = (values.max() - values.min()) / (advantages.max() - advantages.min())
    assert std.item() == pytest.approx(0.065235, abs=6e-7)
    close(values - std * advantages, [[0.016667] * 4] * 3)


def test_the_scale_that_all_centred_steps_share_is_the_worked_one() -> None:
    values = own_gains()
    advantages = centred(values, epsilon=0.0).double()
    scales = (values[0] - values[1:]) / (advantages[0] - advantages[1:])
    close(scales, [[0.061192] * 4] * 2)


def test_without_epsilon_the_first_row_is_the_worked_one() -> None:
    advantages = joint(gains(REWARDS), epsilon=0.0)
    close(advantages[:1], [[1.584026, -0.868659, 0.970855, 0.357683]])
    assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_three_stochastic_steps_whose_last_point_is_the_final_image_give_the_worked_advantages() -> None:
    points = REWARDS[:, [0, 1, 2, 4]]
    close(
        joint(gains(points), epsilon=EPSILON),
        [[1.221167, -0.777106, 1.221167], [-0.777106, 0.846491, 0.346922], [0.596707, -1.276675, -1.401567]],
    )


def test_a_missing_score_voids_both_gains_that_touch_it_and_leaves_the_statistics_alone() -> None:
    rewards = REWARDS.clone()
    rewards[0, 2] = torch.nan
    values = gains(rewards)
    assert values.isnan().tolist() == [[False, True, True, False], [False] * 4, [False] * 4]
    advantages = joint(values, epsilon=EPSILON)
    kept = torch.tensor([0.12, 0.04, -0.04, 0.09, -0.02, 0.07, 0.07, -0.08, -0.05, -0.04], dtype=torch.float64)
    mean, std = kept.mean(), kept.std(correction=0)
    assert advantages[0, 1:3].tolist() == [0.0, 0.0]
    assert advantages[0, 0].item() == pytest.approx(((0.12 - mean) / (std + EPSILON)).item(), abs=6e-7)
    assert torch.isfinite(advantages).all()


def test_a_missing_final_score_voids_the_whole_row_of_uniform_credit() -> None:
    rewards = REWARDS.clone()
    rewards[1, -1] = torch.nan
    advantages = joint(uniform(rewards), epsilon=0.0)
    close(advantages, [[1.0] * 4, [0.0] * 4, [-1.0] * 4])


@pytest.mark.parametrize("level", [0.0, 0.1, 0.7, 1e6])
def test_a_group_in_which_nothing_differs_gets_exactly_zero(level: float) -> None:
    rewards = torch.full((3, 5), level)
    for rule in RULES.values():
        advantages = joint(rule(rewards), epsilon=0.0)
        assert torch.equal(advantages, torch.zeros(3, 4))


def test_a_group_without_any_score_gets_exactly_zero() -> None:
    nothing = torch.full((3, 5), float("nan"))
    for rule in RULES.values():
        assert torch.equal(joint(rule(nothing), epsilon=EPSILON), torch.zeros(3, 4))


def test_the_names_of_the_config_are_the_normalisers() -> None:
    assert set(get_args(CreditConfig.model_fields["normalise"].annotation)) == set(NORMALISERS)


def test_the_std_of_all_groups_of_an_iteration_gives_flow_grpo_s_global_advantages() -> None:
    """A second prompt with rewards .9 .8 .8; the mean stays each prompt's own."""
    first = uniform(REWARDS)
    second = uniform(torch.tensor([[0.9], [0.8], [0.8]], dtype=torch.float64).expand(3, 5))
    pool = torch.cat([first, second])
    close(joint(first, epsilon=EPSILON, pool=pool), [[0.815997] * 4, [0.203999] * 4, [-1.019996] * 4])
    close(joint(second, epsilon=EPSILON, pool=pool), [[0.407998] * 4, [-0.203999] * 4, [-0.203999] * 4])


def test_dance_grpo_s_constants_give_its_advantages() -> None:
    advantages = per_step(uniform(REWARDS), epsilon=1e-8, ddof=1)
    close(advantages, [[0.872872] * 4, [0.218218] * 4, [-1.091089] * 4])


def test_each_step_centred_with_one_scale_gives_the_worked_numbers() -> None:
    close(
        centred(own_gains(), epsilon=EPSILON),
        [
            [1.142077, -0.489461, 1.250846, 0.271923],
            [-1.468384, 1.631538, -0.380692, 0.761384],
            [0.326308, -1.142077, -0.870154, -1.033307],
        ],
    )


def test_per_step_normalisation_is_the_ablation_s_and_dense_grpo_s() -> None:
    close(
        per_step(own_gains(), epsilon=EPSILON),
        [
            [1.045820, -0.412815, 1.376971, 0.358208],
            [-1.344626, 1.376050, -0.419078, 1.002981],
            [0.298806, -0.963235, -0.957893, -1.361189],
        ],
    )


def test_dense_grpo_s_baseline_normalises_the_reward_behind_each_step() -> None:
    """Behind the first step all started from one point, so its column is the gains'."""
    behind = per_step(REWARDS[:, 1:], epsilon=EPSILON)
    close(behind[:, [0, 3]], [[1.045820, 1.068189], [-1.344626, 0.267047], [0.298806, -1.335236]])


def test_advantages_over_a_baseline_and_the_next_baseline_are_the_worked_ones() -> None:
    baseline = torch.tensor([0.02, 0.0, 0.01, 0.02], dtype=torch.float64)
    close(
        from_baseline(own_gains(), baseline=baseline, epsilon=EPSILON),
        [
            [1.580424, -0.632170, 1.106297, 0.316085],
            [-0.948255, 1.422382, -0.474127, 0.790212],
            [0.790212, -1.264340, -0.948255, -0.948255],
        ],
    )
    following = updated_baseline(baseline, own_gains(), decay=0.9)
    assert following.tolist() == pytest.approx([0.023, -0.001, 0.009333, 0.020333], abs=6e-7)


def test_the_first_baseline_is_the_batch_s_mean_and_a_step_unseen_keeps_its_own() -> None:
    values = own_gains()
    first = updated_baseline(None, values, decay=0.9)
    assert first.tolist() == pytest.approx([0.05, -0.01, 0.01 / 3, 0.07 / 3], abs=1e-6)
    unseen = values.clone()
    unseen[:, 2] = torch.nan
    assert updated_baseline(None, unseen, decay=0.9)[2].isnan()
    kept = updated_baseline(first, unseen, decay=0.9)
    assert kept[2] == first[2]
    late = updated_baseline(updated_baseline(None, unseen, decay=0.9), values, decay=0.9)
    assert late[2].item() == pytest.approx(0.01 / 3, abs=1e-6)


def test_gae_over_gains_is_the_worked_one() -> None:
    values = gae(REWARDS, decay=0.9)
    close(
        values,
        [
            [0.177960, 0.064400, 0.116000, 0.040000],
            [0.075830, 0.128700, 0.043000, 0.070000],
            [-0.071660, -0.157400, -0.086000, -0.040000],
        ],
    )
    close(
        joint(values, epsilon=EPSILON),
        [
            [1.557322, 0.361511, 0.904870, 0.104574],
            [0.481871, 1.038604, 0.136164, 0.420480],
            [-1.071230, -1.974090, -1.222233, -0.737843],
        ],
    )


def test_gae_runs_from_gains_to_all_that_follows() -> None:
    assert torch.equal(gae(REWARDS, decay=0.0), own_gains())
    everything = REWARDS[:, -1:] - REWARDS[:, :-1]
    torch.testing.assert_close(gae(REWARDS, decay=1.0), everything)
    torch.testing.assert_close(gae(REWARDS, decay=1 - 1e-7), everything, rtol=0, atol=1e-6)


def test_a_missing_score_voids_what_gae_makes_of_it() -> None:
    rewards = REWARDS.clone()
    rewards[0, 2] = torch.nan
    assert gae(rewards, decay=0.5)[0].isnan().tolist() == [True, True, True, False]
    assert gae(rewards, decay=1.0)[0].isnan().tolist() == [False, False, True, False]
    assert gae(rewards, decay=0.0)[0].isnan().tolist() == [False, True, True, False]
    advantages = joint(gae(rewards, decay=0.5), epsilon=EPSILON)
    assert torch.isfinite(advantages).all()
    assert advantages[0, :3].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("normalise", [per_step, centred])
def test_a_step_at_which_all_members_gained_the_same_teaches_nothing(normalise) -> None:
    values = own_gains()
    values[:, 1] = 0.1
    assert normalise(values, epsilon=0.0)[:, 1].tolist() == [0.0, 0.0, 0.0]


def test_statistics_leave_invalid_step_rewards_out() -> None:
    values = own_gains()
    values[1, 2] = torch.nan
    baseline = torch.zeros(4, dtype=torch.float64)
    for normalise in (joint, per_step, centred, partial(from_baseline, baseline=baseline)):
        advantages = normalise(values, epsilon=EPSILON)
        assert torch.isfinite(advantages).all()
        assert advantages[1, 2] == 0
    column = per_step(values, epsilon=0.0)[:, 2]
    assert column.tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-6)


def test_equal_rewards_teach_nothing_whatever_the_baseline() -> None:
    values = gains(torch.full((3, 5), 0.4))
    baseline = torch.tensor([0.1, 0.2, -0.1, 0.0], dtype=torch.float64)
    assert not from_baseline(values, baseline=baseline, epsilon=EPSILON).any()


def grown(finals: torch.Tensor, explored: torch.Tensor, strides: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tree of groups of one shard."""
    _, members, total = explored.shape
    tables = (each.expand_as(explored) for each in lineage(strides, members=members, total=total))
    return tree(finals, explored, **dict(zip(("branches", "parents"), tables, strict=True)))


def test_a_step_of_a_tree_earns_the_mean_of_its_leaves_once() -> None:
    nan = torch.nan
    finals = torch.tensor([[0.1, 0.3, 0.5, 0.9], [0.2, nan, nan, nan]], dtype=torch.float64)
    explored = torch.tensor([True, True, True, False]).expand(2, 4, 4)
    values, others = grown(finals, explored, {0: 2, 1: 2, 2: 1})
    expected = [
        [[0.2, 0.2, 0.1, nan], [nan, nan, 0.3, nan], [0.7, 0.7, 0.5, nan], [nan, nan, 0.9, nan]],
        [[0.2, 0.2, 0.2, nan], [nan, nan, nan, nan], [nan, nan, nan, nan], [nan, nan, nan, nan]],
    ]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    expected = [
        [[0.7, 0.7, 0.3, nan], [nan, nan, 0.1, nan], [0.2, 0.2, 0.9, nan], [nan, nan, 0.5, nan]],
        [[nan] * 4, [nan, nan, 0.2, nan], [0.2, 0.2, nan, nan], [nan] * 4],
    ]
    torch.testing.assert_close(others, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    # Each depth separately: two nodes .2 and .7 give -1 and 1; leaves .1 .3 .5 .9 have mean .45 and std .2958.
    close(
        NORMALISERS["per_step"](values[0], epsilon=0.0).double(),
        [
            [-1.0, -1.0, -1.183216, 0.0],
            [0.0, 0.0, -0.507093, 0.0],
            [1.0, 1.0, 0.169031, 0.0],
            [0.0, 0.0, 1.521278, 0.0],
        ],
    )


def test_a_calibrated_tree_judges_a_step_without_the_state_it_began_in() -> None:
    """The worked number of docs/method/credit.md: two groups of four leaves, split once at step 1."""
    finals = torch.tensor([[0.1, 0.3, 0.5, 0.9], [0.2, 0.6, 0.4, 0.4]], dtype=torch.float64)
    explored = torch.ones(2, 4, 2, dtype=torch.bool)
    means, others = grown(finals, explored, {0: 2, 1: 1})
    step_rewards, slopes = calibrated_tree(means, others, finals)
    # Step 0: each branch's deviation is minus the other one's, so the state all share predicts nothing.
    # Step 1: deviations -.35 -.15 .05 .45 and -.2 .2 0 0; sum d o = 2 (.0525 + .0225 - .04), sum o^2 = .43.
    close(slopes, [0.0, 0.162791])
    close(step_rewards[0, ::2, 0].double(), [-0.25, 0.25])
    close(step_rewards[0, :, 1].double(), [-0.325581, -0.093023, -0.023256, 0.441860])
    close(step_rewards[1, :, 1].double(), [-0.232558, 0.232558, 0.0, 0.0])


def test_a_branch_without_scored_siblings_earns_its_own_deviation() -> None:
    nan = torch.nan
    finals = torch.tensor([[0.1, nan, 0.5, 0.9]], dtype=torch.float64)
    explored = torch.ones(1, 4, 2, dtype=torch.bool)
    step_rewards, slopes = calibrated_tree(*grown(finals, explored, {0: 2, 1: 1}), finals)
    # Deviations from .5: -.4, 0 and .4; only the last two have each other: sum d o = 0.
    close(slopes, [0.0, 0.0])
    torch.testing.assert_close(step_rewards[0, :, 1], torch.tensor([-0.4, nan, 0.0, 0.4]), equal_nan=True)
    _, slopes = calibrated_tree(*grown(finals, explored & (finals == 0.1).unsqueeze(-1), {0: 2, 1: 1}), finals)
    assert slopes[1].isnan()


def test_the_branches_of_a_shard_hold_no_member_of_another_one() -> None:
    """Two shards of three, shared in pairs: the last branch of each shard has one member."""
    own, parent = lineage({0: 2, 1: 1}, members=3, total=3)
    assert own.T.tolist() == [[0, 0, 2], [0, 1, 2], [0, 1, 2]]
    assert parent.T.tolist() == [[0, 0, 0], [0, 0, 2], [0, 0, 2]]


def test_without_shared_steps_a_tree_is_uniform_credit() -> None:
    explored = torch.ones(1, 3, 4, dtype=torch.bool)
    assert torch.equal(grown(REWARDS[None, :, -1], explored, {})[0][0], uniform(REWARDS))
