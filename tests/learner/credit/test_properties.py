"""What holds for any rewards: telescoping, moments, symmetry, invariance (hypothesis draws the rewards)."""

from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from learner.credit.normalisers import centred, from_baseline, joint, per_step
from learner.credit.rules import calibrated, gae, gains, uniform
from learner.credit.turning_point import aggregates, turning_point
from protocol.config.credit import CreditConfig, TurningPointConfig

EPSILON = 1e-4
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@st.composite
def reward_tables(draw: st.DrawFn) -> torch.Tensor:
    """Rewards of 2 to 6 members at 2 to 7 points, on a grid of hundredths so that equal ones occur."""
    members, points = draw(st.integers(2, 6)), draw(st.integers(2, 7))
    row = st.lists(st.integers(0, 100), min_size=points, max_size=points)
    return torch.tensor(draw(st.lists(row, min_size=members, max_size=members))) / 100


def turned(rewards: torch.Tensor, **choice: bool) -> torch.Tensor:
    explored = torch.ones_like(rewards[:, 1:], dtype=torch.bool)
    return turning_point(rewards[None], explored[None], **TurningPointConfig(**choice).model_dump())[0]


def calibrated_gae(rewards: torch.Tensor) -> torch.Tensor:
    """The default credit: decayed gains of calibrated values."""
    (values,), _ = calibrated(rewards[None])
    return gae(values, decay=CreditConfig().gae_lambda)


def ema(values: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """About a baseline that earlier iterations left."""
    baseline = torch.linspace(-0.06, 0.12, 10, dtype=torch.float64)[: values.shape[1]]
    return from_baseline(values, baseline=baseline, epsilon=epsilon)


def of_the_iteration(normalise, values: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """With the std over this group and another one of twice its spread, as `credit.scale: iteration` takes it."""
    lowest = values.amin(0, keepdim=True)
    pool = torch.cat([values, lowest + 2 * (values - lowest)])
    return normalise(values, epsilon=epsilon, pool=pool)


RULES = {
    "uniform": uniform,
    "gains": gains,
    "gae": partial(gae, decay=0.7),
    "calibrated": calibrated_gae,
    "turning_point": partial(turned, is_balanced=False),
    "balanced": partial(turned, is_balanced=True),
}
NORMALISERS = {
    "joint": joint,
    "per_step": per_step,
    "centred": centred,
    "ema": ema,
    **{f"{rule.__name__}, iteration": partial(of_the_iteration, rule) for rule in (joint, per_step, centred)},
}


@given(reward_tables())
def test_gains_sum_to_the_final_reward_minus_the_first(rewards: torch.Tensor) -> None:
    values = gains(rewards)
    torch.testing.assert_close(values.sum(1), rewards[:, -1] - rewards[:, 0], rtol=0, atol=1e-6)


@given(reward_tables())
def test_joint_advantages_have_mean_0_and_std_1_over_trained_steps(rewards: torch.Tensor) -> None:
    values = gains(rewards)
    advantages = joint(values, epsilon=0.0).double()
    if values.max() > values.min():
        assert advantages.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    else:
        assert not advantages.any()


@given(reward_tables())
def test_steps_that_are_not_trained_change_no_statistic(rewards: torch.Tensor) -> None:
    values = gains(rewards)
    wide = torch.cat([values, torch.full((len(values), 2), torch.nan)], dim=1)
    for normalise in NORMALISERS.values():
        advantages = normalise(wide, epsilon=EPSILON)
        assert torch.equal(advantages[:, :-2], normalise(values, epsilon=EPSILON))
        assert not advantages[:, -2:].any()


@given(reward_tables(), st.lists(st.floats(0.25, 4.0), min_size=6, max_size=6))
def test_weights_applied_before_per_step_normalisation_cancel(rewards: torch.Tensor, weights: list[float]) -> None:
    """Rewards in eighths, so that gains which are equal stay equal."""
    values = gains((rewards * 8).round() / 8)
    weighted = per_step(values * torch.tensor(weights)[: values.shape[1]], epsilon=0.0)
    torch.testing.assert_close(weighted, per_step(values, epsilon=0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "balanced"])
@settings(max_examples=15)
@given(rewards=reward_tables(), numbers=st.randoms(use_true_random=False))
def test_permuting_members_permutes_rows(rule: str, rewards: torch.Tensor, numbers) -> None:
    """But for balanced turning points: ties between members go to the first one."""
    order = list(range(len(rewards)))
    numbers.shuffle(order)
    before, after = RULES[rule](rewards), RULES[rule](rewards[order])
    for normalise in NORMALISERS.values():
        expected = normalise(before, epsilon=EPSILON)[order]
        torch.testing.assert_close(normalise(after, epsilon=EPSILON), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15)
@given(rewards=reward_tables(), constant=st.integers(-3, 3))
def test_a_constant_added_to_all_rewards_changes_nothing(rule: str, rewards: torch.Tensor, constant: int) -> None:
    """Rewards in eighths, so that adding a whole number is exact in float32. A baseline of rewards would not follow."""
    rewards = (rewards * 8).round() / 8
    before, after = RULES[rule](rewards), RULES[rule](rewards + constant)
    for name, normalise in NORMALISERS.items():
        if (rule, name) != ("uniform", "ema"):
            expected = normalise(before, epsilon=EPSILON)
            torch.testing.assert_close(normalise(after, epsilon=EPSILON), expected, rtol=1e-4, atol=1e-4)


def turns_by_definition(rewards: list[float]) -> list[bool]:
    """TP-GRPO's definitions 4.1 and 5.1 and remark 5.2, step by step and in whole hundredths."""
    levels = [round(100 * reward) for reward in rewards]
    trend, before, turns = levels[-1] - levels[0], -1, []
    for level, following in pairwise(levels):
        agrees = (following - level) * trend
        turns.append(before < 0 < agrees and (following - level) * (levels[-1] - following) > 0)
        before = agrees
    return turns


@given(reward_tables())
@example(torch.tensor([[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.57, 0.49, 0.44, 0.40]]))
def test_consistent_turning_points_and_no_other_steps_earn_their_aggregate_which_exceeds_the_gain(
    rewards: torch.Tensor,
) -> None:
    own, values = gains(rewards), turned(rewards, is_balanced=False)
    selected = ~aggregates(rewards, is_consistent=True, has_first_step=True).isnan()
    assert selected.tolist() == [turns_by_definition(row) for row in rewards.tolist()]
    assert torch.equal(values, torch.where(selected, rewards[:, -1:] - rewards[:, :-1], own))
    assert (values.abs() >= own.abs())[selected].all()


@given(reward_tables())
def test_gae_between_its_ends_lies_between_gain_and_return_for_rising_rewards(rewards: torch.Tensor) -> None:
    rising = rewards.cumsum(1)
    low, middle, high = (gae(rising, decay=decay) for decay in (0.0, 0.5, 1.0))
    assert (low <= middle + 1e-5).all()
    assert (middle <= high + 1e-5).all()
