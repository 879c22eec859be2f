"""The learner's own look at what it is given: its groups' places, and members that are the same."""

import numpy as np
import pytest

from learner.update.ledger import duplicates, ledger
from protocol.errors import ContractError
from protocol.messages import Prompt, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest


def rollout(iteration: int = 0, group: int = 0, *, first: int = 0, finals: tuple[float, ...] = (0.0, 1.0)) -> Rollout:
    request = ShardRequest(
        iteration=iteration,
        group=group,
        prompt=Prompt(index=0, text="a"),
        first_member=first,
        members=len(finals),
        adapter_version=0,
        adapter_digest="d",
    )
    latents = np.zeros((len(finals), 3, 1, 2, 2), np.float32)
    latents[:, -1] = np.array(finals, np.float32).reshape(-1, 1, 1, 1)
    return Rollout(
        request=request,
        steps=(0, 1),
        latents=latents,
        log_probs=np.zeros((len(finals), 2), np.float32),
        image_index=np.zeros((len(finals), 1), np.int64),
    )


def group(*rollouts: Rollout) -> ScoredGroup:
    shards = tuple(ScoredShard(rollout=each, scores=Scores.missing(1, "none")) for each in rollouts)
    return ScoredGroup(prompt=Prompt(index=0, text="a"), shards=shards)


def test_the_ledger_names_the_places_of_an_iteration_s_own_groups():
    groups = [group(rollout(4, place), rollout(4, place, first=2)) for place in range(3)]
    assert ledger(groups, iteration=4) == {"ledger/first": 12.0, "ledger/last": 14.0}


@pytest.mark.parametrize(
    ("groups", "odd"),
    [
        ([group(rollout(3, 0)), group(rollout(3, 1))], r"\[\(3, 0\)\] at place 0"),
        ([group(rollout(4, 1)), group(rollout(4, 0))], r"\[\(4, 1\)\] at place 0"),
        ([group(rollout(4, 0)), group(rollout(4, 0))], r"\[\(4, 0\)\] at place 1"),
        ([group(rollout(4, 0), rollout(4, 1)), group(rollout(4, 1))], r"\[\(4, 0\), \(4, 1\)\] at place 0"),
    ],
    ids=["an older iteration's", "in another order", "one twice", "a shard of another group"],
)
def test_groups_that_are_not_this_iteration_s_own_in_order_are_refused(groups, odd):
    with pytest.raises(ContractError, match=f"iteration 4 must learn from its own groups 0 to 1 in order, .*{odd}"):
        ledger(groups, iteration=4)


def test_members_that_end_in_the_same_latents_are_counted_across_shards():
    assert duplicates([rollout(finals=(0.0, 1.0)), rollout(first=2, finals=(2.0, 3.0))]) == 0
    assert duplicates([rollout(finals=(0.0, 1.0)), rollout(first=2, finals=(1.0, 1.0))]) == 2
