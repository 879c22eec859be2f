"""TP-GRPO on the worked example: which steps turn a trajectory round, what they earn, and what balancing leaves."""

import pytest
import torch

from learner.credit.normalise import per_step
from learner.credit.turning_point import balanced, find_turns, turning_point
from protocol.config.credit import TurningPointConfig

TABLE = [[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]]
REWARDS = torch.tensor(TABLE, dtype=torch.float64)
ALL = torch.ones(3, 5, dtype=torch.bool)
MEMBERS = "ABC"


def selected(*, is_consistent: bool, has_first_step: bool = True) -> set[str]:
    """Names such as B4: member B, step 4 counted from 1 as the paper does."""
    turns = find_turns(REWARDS, ALL, is_consistent=is_consistent, has_first_step=has_first_step)
    return {f"{MEMBERS[member]}{step + 1}" for member, step in turns.selected.nonzero().tolist()}


def advantages(**choice: bool) -> torch.Tensor:
    ((values, valid),) = turning_point([(REWARDS, ALL)], TurningPointConfig(**choice))
    return per_step(values, valid, epsilon=1e-4)


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=6e-7)


def test_the_plain_rule_selects_every_change_of_direction_towards_the_trend() -> None:
    assert selected(is_consistent=False) == {"A1", "A3", "B2", "B4", "C2"}


def test_the_consistent_rule_drops_the_last_step() -> None:
    assert selected(is_consistent=True) == {"A1", "A3", "B2", "C2"}


def test_without_the_remark_the_first_step_is_never_selected() -> None:
    assert selected(is_consistent=False, has_first_step=False) == {"A3", "B2", "B4", "C2"}


def test_aggregates_are_all_that_is_gained_from_the_step_on() -> None:
    turns = find_turns(REWARDS, ALL, is_consistent=True, has_first_step=True)
    picked = {
        name: turns.aggregates[MEMBERS.index(name[0]), int(name[1]) - 1].item() for name in ("A1", "A3", "B2", "C2")
    }
    assert picked == {
        "A1": pytest.approx(0.20), "A3": pytest.approx(0.12), "B2": pytest.approx(0.14), "C2": pytest.approx(-0.17)
    }  # fmt: skip
    assert (turns.aggregates.abs() > turns.gains.abs())[turns.selected].all(), "Definition 5.1's consequence"


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
    turns = find_turns(REWARDS, ALL, is_consistent=is_consistent, has_first_step=True)
    (kept,) = balanced([turns])
    assert kept.nonzero().tolist() == [[0, 0], [2, 1]]
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
    falling = 1 - rising
    both = torch.ones(1, 3, dtype=torch.bool)
    alone = turning_point([(rising, both)], TurningPointConfig())
    together = turning_point([(rising, both), (falling, both), (rising * 2, both)], TurningPointConfig())
    assert alone[0][0][0, 0].item() == pytest.approx(0.2), "one sign only: all stay"
    assert together[0][0][0, 0].item() == pytest.approx(0.1), "the larger positive one stays, this one reverts"
    assert together[2][0][0, 0].item() == pytest.approx(0.4)
    assert together[1][0][0, 0].item() == pytest.approx(-0.2)


def test_ties_go_to_the_first_group_member_and_step() -> None:
    rising, falling = torch.tensor([[0.0, 0.25, 0.5]]), torch.tensor([[0.5, 0.25, 0.0]])
    both = torch.ones(1, 3, dtype=torch.bool)
    values = turning_point([(rising, both), (rising, both), (falling, both)], TurningPointConfig())
    assert [each[0][0, 0].item() for each in values] == [0.5, 0.25, -0.5]


@pytest.mark.parametrize("is_consistent", [False, True])
def test_a_step_without_gain_never_turns_anything(is_consistent: bool) -> None:
    rewards = torch.tensor([[0.5, 0.5, 0.6, 0.7], [0.5, 0.4, 0.4, 0.6], [0.5, 0.6, 0.4, 0.5]])
    valid = torch.ones(3, 4, dtype=torch.bool)
    turns = find_turns(rewards, valid, is_consistent=is_consistent, has_first_step=True)
    assert not turns.selected.any(), "0 before, 0 at the step, or no trend at all"


def test_a_missing_reward_selects_nothing_that_it_touches() -> None:
    rewards, valid = REWARDS.clone(), ALL.clone()
    rewards[0, 0], valid[0, 0] = float("nan"), False
    rewards[1, 2], valid[1, 2] = float("nan"), False
    turns = find_turns(rewards, valid, is_consistent=False, has_first_step=True)
    assert turns.selected.nonzero().tolist() == [[2, 1]]
    assert turns.valid[1].tolist() == [True, False, False, True]
    values, step_valid = turns.step_rewards(turns.selected)
    assert torch.isfinite(values[step_valid]).all()
