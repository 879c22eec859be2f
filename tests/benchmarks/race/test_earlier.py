"""Credit with the statistics of the iteration before: what differs from the default, and what does not."""

import pytest
import torch

from benchmarks.race.earlier import Earlier
from learner.credit.assign import Assignment, assign_credit
from learner.credit.tables import RewardTables
from protocol.config.credit import CreditConfig

CONFIG = CreditConfig()
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def table(seed: int, scale: float = 1.0) -> RewardTables:
    rewards = scale * torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(seed))
    alone = torch.arange(5).view(1, 5, 1).expand(3, 5, 3)
    explored = torch.ones(3, 5, 3, dtype=torch.bool)
    return RewardTables(rewards=rewards, scores={}, explored=explored, branches=alone, parents=alone)


def default(tables: RewardTables) -> Assignment:
    return assign_credit(tables, CONFIG, reward_weights={"red": 1.0}, step_weights=WEIGHTS)


def test_the_first_iteration_has_its_own_statistics_and_each_later_one_those_before():
    credit = Earlier()
    found = [
        credit(tables, CONFIG, reward_weights={"red": 1.0}, step_weights=WEIGHTS)
        for tables in (table(0), table(0), table(1), table(1), table(2))
    ]
    own = [default(table(seed)) for seed in range(3)]
    assert torch.equal(found[0].advantages, own[0].advantages)
    for twice, first in ((found[1], found[0]), (found[3], found[2])):
        assert torch.equal(twice.advantages, first.advantages), "the second call of an iteration is the first one again"
    for late, before, now in ((found[2], own[0], own[1]), (found[4], own[1], own[2])):
        assert late.slopes is not None and before.slopes is not None
        assert torch.equal(late.slopes, before.slopes), "of the default, not of what was in use"
        assert not torch.equal(late.advantages, now.advantages)


def test_twice_the_rewards_with_the_std_before_are_twice_the_advantages():
    credit = Earlier()
    credit(table(0), CONFIG, reward_weights={"red": 1.0}, step_weights=WEIGHTS)
    late = credit(table(0, scale=2.0), CONFIG, reward_weights={"red": 1.0}, step_weights=WEIGHTS)
    assert late.advantages.numpy() == pytest.approx(2 * default(table(0)).advantages.numpy(), rel=1e-5)
