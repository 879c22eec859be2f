"""TP-GRPO on the worked example: which steps turn a trajectory round, what they earn, and what balancing leaves."""

import pytest
import torch

from learner.credit.normalisers import per_step
from learner.credit.rules import gains
from learner.credit.turning_point import aggregates, balanced, turning_point
from protocol.config.credit import TurningPointConfig
from tests.support.learning.worked_group import REWARDS

MEMBERS = "ABC"


def selected(*, is_consistent: bool, has_first_step: bool = True) -> set[str]:
    """Names such as B4: member B, step 4 counted from 1 as the paper does."""
    turns = aggregates(REWARDS, is_consistent=is_consistent, has_first_step=has_first_step)
    return {f"{MEMBERS[member]}{step + 1}" for member, step in positions(turns)}


def positions(turns: torch.Tensor) -> list[list[int]]:
    """Indices of the selected steps."""
    return (~turns.isnan()).nonzero().tolist()


def step_rewards(*groups: torch.Tensor, **choice: bool) -> torch.Tensor:
    """Step rewards of groups that explored every step."""
    rewards = torch.stack(groups)
    return turning_point(
        rewards, torch.ones_like(rewards[..., 1:], dtype=torch.bool), **TurningPointConfig(**choice).model_dump()
    )


def advantages(**choice: bool) -> torch.Tensor:
    return per_step(step_rewards(REWARDS, **choice)[0], epsilon=1e-4)


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=6e-7)


def test_the_plain_rule_selects_every_change_of_direction_towards_the_trend() -> None:
    assert selected(is_consistent=False) == {"A1", "A3", "B2", "B4", "C2"}


def test_the_consistent_rule_drops_the_last_step() -> None:
    assert selected(is_consistent=True) == {"A1", "A3", "B2", "C2"}


def test_without_the_remark_the_first_step_is_never_selected() -> None:
    assert selected(is_consistent=False, has_first_step=False) == {"A3", "B2", "B4", "C2"}


def test_aggregates_are_all_that_is_gained_from_the_step_on() -> None:
    turns = aggregates(REWARDS, is_consistent=True, has_first_step=True)
    picked = {name: turns[MEMBERS.index(name[0]), int(name[1]) - 1].item() for name in ("A1", "A3", "B2", "C2")}
    assert picked == {
        "A1": pytest.approx(0.20), "A3": pytest.approx(0.12), "B2": pytest.approx(0.14), "C2": pytest.approx(-0.17)
    }  # fmt: skip
    assert (turns.abs() > gains(REWARDS).abs())[~turns.isnan()].all(), "Definition 5.1's consequence"


CONSTRAINED = [
    [1.256031, -0.131023, 1.392876, 0.358208],
    [-1.188137, 1.284022, -0.494246, 1.002981],
    [-0.067894, -1.152999, -0.898630, -1.361189],
]


def test_constrained_advantages_without_balancing_are_the_worked_ones() -> None:
    close(advantages(is_consistent=True, is_balanced=False), CONSTRAINED)


def test_the_plain_rule_s_advantages_are_the_same_here_since_nothing_follows_the_last_step() -> None:
    close(advantages(is_consistent=False, is_balanced=False), CONSTRAINED)


@pytest.mark.parametrize("is_consistent", [True, False])
def test_balancing_leaves_the_largest_of_each_sign(is_consistent: bool) -> None:
    """The plain rule's further choice, B4 with .07, ranks behind A1 with .20: both versions keep the same ones here."""
    turns = aggregates(REWARDS, is_consistent=is_consistent, has_first_step=True)
    assert positions(balanced(turns)) == [[0, 0], [2, 1]]
    close(
        advantages(is_consistent=is_consistent, is_balanced=True),
        [
            [1.256031, 0.000000, 1.376971, 0.358208],
            [-1.188137, 1.223592, -0.419078, 1.002981],
            [-0.067894, -1.223592, -0.957893, -1.361189],
        ],
    )


def test_balancing_looks_at_all_groups_of_the_iteration() -> None:
    rising = torch.tensor([[0.1, 0.2, 0.3]])
    alone = step_rewards(rising)
    together = step_rewards(rising, 1 - rising, rising * 2)
    assert alone[0, 0, 0].item() == pytest.approx(0.2), "one sign only: all stay"
    assert together[0, 0, 0].item() == pytest.approx(0.1), "the larger positive one stays, this one reverts"
    assert together[2, 0, 0].item() == pytest.approx(0.4)
    assert together[1, 0, 0].item() == pytest.approx(-0.2)


def test_ties_go_to_the_first_group_member_and_step() -> None:
    rising, falling = torch.tensor([[0.0, 0.25, 0.5]]), torch.tensor([[0.5, 0.25, 0.0]])
    assert step_rewards(rising, rising, falling)[:, 0, 0].tolist() == [0.5, 0.25, -0.5]


@pytest.mark.parametrize("is_consistent", [False, True])
def test_a_step_without_gain_never_turns_anything(is_consistent: bool) -> None:
    rewards = torch.tensor([[0.5, 0.5, 0.6, 0.7], [0.5, 0.4, 0.4, 0.6], [0.5, 0.6, 0.4, 0.5]])
    turns = aggregates(rewards, is_consistent=is_consistent, has_first_step=True)
    assert turns.isnan().all(), "0 before, 0 at the step, or no trend at all"


RETURNING = [0.3, 0.6, 0.5, 0.6, 0.5]
"""Turns at its third step, from 0.5 to 0.6, and ends where that step began: its aggregate is 0."""


@pytest.mark.parametrize("others", [[], [[0.9, 0.5, 0.6, 0.2, 0.1]]], ids=["alone", "beside a negative aggregate"])
def test_an_aggregate_of_zero_leaves_the_step_its_gain_as_in_the_release(others: list[list[float]]) -> None:
    rewards = torch.tensor([RETURNING, *others], dtype=torch.float64)
    values = step_rewards(rewards, is_consistent=False, has_first_step=False, is_balanced=True)[0]
    assert values[0].tolist() == pytest.approx([0.3, -0.1, 0.1, -0.1])
    if others:
        assert values[1].tolist() == pytest.approx([-0.4, 0.1, -0.5, -0.1]), (
            "0.1 - 0.6 at the turn, with nothing to balance"
        )


def test_an_aggregate_against_the_trend_counts_by_its_own_sign_where_the_release_takes_the_trends() -> None:
    """0.85 -> 0.87 turns a trajectory that rises over all, but the rest falls to 0.6: r_agg = -0.25, R_S - R_0 = .1."""
    rewards = torch.tensor([[0.5, 0.9, 0.85, 0.87, 0.6], [0.1, 0.2, 0.15, 0.3, 0.4]], dtype=torch.float64)
    turns = aggregates(rewards, is_consistent=False, has_first_step=False)
    assert positions(turns) == [[0, 2], [1, 2]]
    assert [turns[0, 2].item(), turns[1, 2].item()] == pytest.approx([-0.25, 0.25])
    assert positions(balanced(turns)) == positions(turns), "one of each sign"
    rising = torch.cat([turns, torch.full((1, 4), torch.nan, dtype=turns.dtype)])
    rising[2, 1] = 0.1
    assert positions(balanced(rising)) == positions(turns), "by the trend all three are positive and would stay"
    assert aggregates(rewards, is_consistent=True, has_first_step=False)[0].isnan().all(), "consistent turns agree"


def test_a_missing_reward_selects_nothing_that_it_touches() -> None:
    rewards = REWARDS.clone()
    rewards[0, 0] = rewards[1, 2] = torch.nan
    assert positions(aggregates(rewards, is_consistent=False, has_first_step=True)) == [[2, 1]]
    values = step_rewards(rewards, is_consistent=False)[0]
    assert values.isnan().tolist() == [[True, False, False, False], [False, True, True, False], [False] * 4]


def test_the_step_before_is_the_trajectory_s_own_stochastic_step_before() -> None:
    """Three stochastic steps of six: A falls at step 0, and turns at step 3, the second that it explored."""
    rewards = torch.full((1, 2, 7), torch.nan)
    rewards[0, 0, [0, 3, 4, 6]] = torch.tensor([0.5, 0.4, 0.6, 0.7])
    rewards[0, 1, [1, 2, 5, 6]] = torch.tensor([0.5, 0.4, 0.6, 0.7])
    explored = torch.zeros(1, 2, 6, dtype=torch.bool)
    explored[0, 0, [0, 3, 4]] = explored[0, 1, [1, 2, 5]] = True
    values = turning_point(rewards, explored, is_consistent=True, has_first_step=True, is_balanced=False)
    assert values[0, 0, [0, 3, 4]].tolist() == pytest.approx([-0.1, 0.3, 0.1])
    assert values[0, 1, [1, 2, 5]].tolist() == pytest.approx([-0.1, 0.3, 0.1])
    assert torch.equal(values.isnan(), ~explored)
