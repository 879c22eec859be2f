"""What holds for any rewards: telescoping, moments, symmetry, invariance (hypothesis draws the rewards)."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from learner.credit import gae, gains, uniform
from learner.normalise import centred, joint, per_step
from learner.turning_point import turning_point
from protocol.config_learning import TurningPointConfig

EPSILON = 1e-4
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@st.composite
def reward_tables(draw: st.DrawFn) -> torch.Tensor:
    """Rewards of 2 to 6 members at 2 to 7 points, on a grid of hundredths so that equal ones occur."""
    members, points = draw(st.integers(2, 6)), draw(st.integers(2, 7))
    row = st.lists(st.integers(0, 100), min_size=points, max_size=points)
    return torch.tensor(draw(st.lists(row, min_size=members, max_size=members))) / 100


def everything(rewards: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(rewards, dtype=torch.bool)


def plain(rule, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rule(rewards, everything(rewards), steps=rewards.shape[1] - 1)


def turned(rewards: torch.Tensor, **choice: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return turning_point([(rewards, everything(rewards))], TurningPointConfig(**choice))[0]


RULES = {
    "uniform": partial(plain, uniform),
    "gains": partial(plain, gains),
    "gae": partial(plain, partial(gae, decay=0.7)),
    "turning_point": turned,
}
NORMALISERS = {"joint": joint, "per_step": per_step, "centred": centred}


@given(reward_tables())
def test_gains_sum_to_the_final_reward_minus_the_first(rewards: torch.Tensor) -> None:
    values, _ = plain(gains, rewards)
    torch.testing.assert_close(values.sum(1), rewards[:, -1] - rewards[:, 0], rtol=0, atol=1e-6)


@given(reward_tables())
def test_joint_advantages_have_mean_0_and_std_1_over_trained_steps(rewards: torch.Tensor) -> None:
    values, valid = plain(gains, rewards)
    advantages = joint(values, valid, epsilon=0.0).double()
    if values.max() > values.min():
        assert advantages.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    else:
        assert not advantages.any()


@given(reward_tables())
def test_steps_that_are_not_trained_change_no_statistic(rewards: torch.Tensor) -> None:
    values, valid = plain(gains, rewards)
    wide = torch.cat([values, torch.full((len(values), 2), 99.0)], dim=1)
    wide_valid = torch.cat([valid, torch.zeros(len(valid), 2, dtype=torch.bool)], dim=1)
    for normalise in NORMALISERS.values():
        advantages = normalise(wide, wide_valid, epsilon=EPSILON)
        assert torch.equal(advantages[:, :-2], normalise(values, valid, epsilon=EPSILON))
        assert not advantages[:, -2:].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("normalise", NORMALISERS)
@settings(max_examples=30)
@given(rewards=reward_tables(), numbers=st.randoms(use_true_random=False))
def test_permuting_members_permutes_rows(rule: str, normalise: str, rewards: torch.Tensor, numbers) -> None:
    order = list(range(len(rewards)))
    numbers.shuffle(order)
    apply = partial(RULES[rule], is_balanced=False) if rule == "turning_point" else RULES[rule]
    before = NORMALISERS[normalise](*apply(rewards), epsilon=EPSILON)
    after = NORMALISERS[normalise](*apply(rewards[order]), epsilon=EPSILON)
    torch.testing.assert_close(after, before[order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["uniform", "gains", "gae"])
@pytest.mark.parametrize("normalise", NORMALISERS)
@settings(max_examples=30)
@given(rewards=reward_tables(), constant=st.integers(-3, 3))
def test_a_constant_added_to_all_rewards_changes_nothing(
    rule: str, normalise: str, rewards: torch.Tensor, constant: int
) -> None:
    """Rewards in eighths, so that adding a whole number is exact in float32."""
    rewards = (rewards * 8).round() / 8
    before = NORMALISERS[normalise](*RULES[rule](rewards), epsilon=EPSILON)
    after = NORMALISERS[normalise](*RULES[rule](rewards + constant), epsilon=EPSILON)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@given(reward_tables())
def test_aggregates_of_consistent_turning_points_exceed_their_gains(rewards: torch.Tensor) -> None:
    own, _ = plain(gains, rewards)
    values, _ = turned(rewards, is_balanced=False)
    changed = values != own
    assert (values.abs() >= own.abs() - 1e-6)[changed].all()


@given(reward_tables())
def test_gae_between_its_ends_lies_between_gain_and_return_for_rising_rewards(rewards: torch.Tensor) -> None:
    rising = rewards.cumsum(1)
    low, middle, high = (plain(partial(gae, decay=decay), rising)[0] for decay in (0.0, 0.5, 1.0))
    assert (low <= middle + 1e-5).all()
    assert (middle <= high + 1e-5).all()
