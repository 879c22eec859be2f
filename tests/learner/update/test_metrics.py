"""Metrics of groups made by hand: members that are the same, and shares of groups that teach nothing."""

import numpy as np
import pytest
import torch
from torch import nn

from learner.credit.assign import assign_credit
from learner.credit.tables import reward_tables
from learner.update.metrics import StepStatistics, group_metrics, update_metrics, zero_share
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


def test_the_share_of_zeros_leaves_out_what_can_only_be_zero() -> None:
    """A while its B is 0, and a parameter without a gradient; the rest has 3 zeros in 8 numbers."""
    gradients = {
        "q.lora_A": [0.0, 0.0, 0.0, 0.0],
        "q.lora_B": [0.0, 1.0, 1.0, 1.0],
        "k.lora_A": [0.0, 0.0, 1.0, 1.0],
        "k.lora_B": None,
    }
    parameters = {name: nn.Parameter(torch.full((4,), float(name != "q.lora_B"))) for name in gradients}
    for name, values in gradients.items():
        parameters[name].grad = None if values is None else torch.tensor(values)
    assert zero_share(parameters) == 3 / 8


def test_steps_that_were_not_taken_have_no_share_of_zeros() -> None:
    skipped, taken = StepStatistics(pairs=2, grad_norm=None), StepStatistics(pairs=2, grad_norm=1.0, zeros=0.25)
    assert "train/zero_gradients" not in update_metrics([], [skipped])
    assert update_metrics([], [skipped, taken])["train/zero_gradients"] == 0.25
