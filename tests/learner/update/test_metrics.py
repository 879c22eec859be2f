"""Metrics of groups made by hand: members that are the same, and shares of groups that teach nothing."""

import numpy as np
import pytest
import torch

from learner.credit.assign import assign_credit
from learner.credit.tables import reward_tables
from learner.update.metrics import group_metrics
from protocol.config.credit import CreditConfig
from protocol.messages import Prompt, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest

PROMPT = Prompt(index=0, text="a")


def shard(first: int, finals: tuple[float, ...], scores: Scores) -> ScoredShard:
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=PROMPT,
        first_member=first,
        members=len(finals),
        adapter_version=0,
        adapter_digest="",
    )
    latents = np.zeros((len(finals), 3, 1, 2, 2), np.float32)
    latents[:, -1] = np.array(finals, np.float32).reshape(-1, 1, 1, 1)
    rollout = Rollout(
        request=request,
        steps=(0, 1),
        latents=latents,
        log_probs=np.zeros((len(finals), 2), np.float32),
        image_index=np.arange(len(finals)).reshape(-1, 1),
    )
    return ScoredShard(rollout=rollout, facts=rollout.facts(), scores=scores)


def group(*finals: tuple[float, float], rewards: tuple[float, ...] = (0.1, 0.3, 0.2, 0.6)) -> ScoredGroup:
    """Two shards of two members that end in these latents."""
    shards = []
    for index, own in enumerate(finals):
        values = np.array(rewards[2 * index : 2 * index + 2], np.float32)
        valid = np.isfinite(values)
        scores = Scores(values=values, valid=valid, reasons=tuple("" if ok else "blurred" for ok in valid))
        shards.append(shard(2 * index, own, scores))
    return ScoredGroup(prompt=PROMPT, shards=tuple(shards))


def metrics_of(*groups: ScoredGroup) -> dict[str, float]:
    tables = reward_tables(groups, members=4, total=2)
    assignment = assign_credit(tables, CreditConfig(rule="uniform"), reward_weights={}, step_weights=torch.ones(2))
    return group_metrics(groups, tables, assignment)


def test_members_that_end_in_the_same_latents_are_counted_across_shards() -> None:
    assert metrics_of(group((0.0, 1.0), (2.0, 3.0)))["group/duplicates"] == 0
    assert metrics_of(group((0.0, 1.0), (1.0, 1.0)))["group/duplicates"] == 2


def test_the_same_latents_in_two_groups_are_no_duplicates() -> None:
    assert metrics_of(group((0.0, 1.0), (2.0, 3.0)), group((0.0, 1.0), (2.0, 3.0)))["group/duplicates"] == 0


def test_groups_that_teach_nothing_are_counted_by_their_reason() -> None:
    nan = float("nan")
    ends = (0.0, 1.0), (2.0, 3.0)
    metrics = metrics_of(group(*ends), group(*ends, rewards=(nan,) * 4), group(*ends, rewards=(0.5,) * 4), group(*ends))
    assert metrics["group/zero_variance"] == 0.5
    assert metrics["group/unscored"] == 0.25
    assert metrics["reward/missing"] == 4
    assert metrics["reward/mean"] == pytest.approx((0.3 + 0.5 + 0.3) / 3)
