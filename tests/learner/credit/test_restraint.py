"""Whom the KL term holds back and who may lead: worked numbers, ties, missing scores, an oracle over random groups."""

import math

import numpy as np
import pytest
import torch

from learner.credit.assign import assign_credit
from learner.credit.restraint import doubtful, rank_shares, scaled_by_distance
from learner.credit.tables import RewardTables
from protocol.config.credit import CreditConfig
from protocol.config.learning import KlConfig
from protocol.errors import ContractError

NAN = math.nan


def test_a_rank_is_the_share_of_the_others_that_are_lower() -> None:
    assert rank_shares(torch.tensor([0.1, 0.9, 0.4, 0.4, 0.2])).tolist() == [0.0, 1.0, 0.625, 0.625, 0.25]
    assert rank_shares(torch.tensor([0.1, NAN, 0.4]))[[0, 2]].tolist() == [0.0, 1.0]
    assert rank_shares(torch.tensor([0.1, NAN, 0.4]))[1].isnan()
    assert rank_shares(torch.tensor([0.3])).tolist() == [0.5]


def test_the_members_worked_by_hand_are_doubtful() -> None:
    """Ranks by the reward 1 .75 .5 .25 0, by the auxiliary ones 0 .25 .5 .75 1 and .5 1 .75 .25 0; their mean .25 .625
    .625 .5 .5, so u = .75 .125 -.125 -.25 -.5."""
    reward = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    others = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 5.0, 4.0, 2.0, 1.0]])
    for share, expected in ((0.1, [0]), (0.2, [0]), (0.3, [0, 1]), (1.0, [0, 1])):
        assert doubtful(reward, others, share=share).nonzero().flatten().tolist() == expected
    assert not doubtful(reward, reward[None], share=1.0).any(), "who agrees has no doubt"
    many = torch.arange(50.0)
    assert doubtful(many, -many[None], share=0.14).sum() == 7, "0.14 of 50 is 7, not a little more"
    lacking = torch.where(torch.arange(5) == 0, torch.nan, others)
    assert doubtful(reward, lacking, share=0.2).nonzero().flatten().tolist() != [0]


def test_doubtful_members_are_numpy_s_over_random_groups() -> None:
    random = np.random.default_rng(3)
    for _ in range(30):
        scores = random.permuted(np.tile(np.arange(8.0), (3, 1)), axis=1)
        share = random.uniform(0.05, 1)
        doubt = np.round(scores[0] / 7 - scores[1:].mean(0) / 7, 9)
        order = sorted(range(8), key=lambda member: (-doubt[member], member))[: math.ceil(share * 8)]
        expected = sorted(member for member in order if doubt[member] > 0)
        table = torch.from_numpy(scores)
        found = doubtful(table[0], table[1:], share=share).nonzero().flatten().tolist()
        assert found == expected


def test_good_members_that_differ_pull_more() -> None:
    advantages = torch.tensor([[1.0, -1.0], [2.0, 0.0], [-3.0, 1.0]])
    found = scaled_by_distance(advantages, torch.tensor([0.1, 0.2, 0.3]))
    assert found.flatten().tolist() == pytest.approx([0.5, -1.0, 2.0, 0.0, -3.0, 1.5])
    lacking = scaled_by_distance(advantages, torch.tensor([0.1, NAN, 0.3]))
    assert lacking.flatten().tolist() == pytest.approx([0.5, -1.0, 2.0, 0.0, -3.0, 1.5])
    assert torch.equal(scaled_by_distance(advantages, torch.zeros(3)), advantages)
    assert torch.equal(scaled_by_distance(advantages, torch.full((3,), NAN)), advantages)


def test_numbers_below_0_are_no_distances() -> None:
    """They would turn an advantage above 0 into one below; equal images may have a distance of -0, by rounding."""
    advantages = torch.tensor([[1.0], [2.0], [-3.0]])
    with pytest.raises(ContractError, match=r"credit.diversity must name a reward of distances, .* got -0.5"):
        scaled_by_distance(advantages, torch.tensor([-0.5, 1.0, 1.0]))
    found = scaled_by_distance(advantages, torch.tensor([-1e-6, 0.2, 0.4]))
    assert found[0].item() == 0.0 and found[1].item() == pytest.approx(2.0)


def test_credit_reads_the_named_scores_of_the_finished_images() -> None:
    rewards = torch.full((1, 4, 3), NAN)
    rewards[0, :, -1] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    other, distance = rewards.flip(1), torch.zeros_like(rewards) + torch.tensor([1.0, 2.0, 3.0, 2.0])[None, :, None]
    alone = torch.arange(4).view(1, 4, 1).expand(1, 4, 2)
    tables = RewardTables(
        rewards=rewards,
        scores={"other": other, "far": distance},
        explored=torch.ones(1, 4, 2, dtype=torch.bool),
        branches=alone,
        parents=alone,
    )

    def assigned(kl: KlConfig, **credit: str | None) -> tuple[list[float], list[bool] | None]:
        config = CreditConfig(
            rule="uniform", normalise="joint", scale="prompt", step_weights={"rule": "none"}, **credit
        )
        found = assign_credit(tables, config, reward_weights={}, step_weights=torch.ones(2), kl=kl)
        chosen = None if found.doubtful is None else found.doubtful[0].tolist()
        return (found.advantages[0, :, 0] / found.advantages[0, 3, 0].abs()).tolist(), chosen

    gated = KlConfig(weight=0.1, auxiliary=("other",), share=0.25)
    assert assigned(gated)[1] == [True, False, False, False]
    assert assigned(KlConfig(auxiliary=("other",)))[1] is None
    plain, scaled = assigned(KlConfig())[0], assigned(KlConfig(), diversity="far")[0]
    assert [scaled[0] / plain[0], scaled[1] / plain[1]] == pytest.approx([0.5, 1.0])
    assert scaled[2:] == plain[2:]
