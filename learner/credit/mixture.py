"""Several rewards in one update: advantages that are mixed after normalisation, and each reward's own gains.

With `credit.mixture: rewards` the weighted sum of raw scores is credited and normalised as one reward. With
`advantages` each reward is credited and normalised by itself and the weighted sum of the advantages trains: then a
reward's weight is its share of the update whatever its scale and spread are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from learner.credit.assign import Assignment, assign_credit
from protocol.config.credit import CreditConfig
from protocol.errors import ContractError
from protocol.messages import COMMON_IMAGE, ScoredGroup, Scores


def assign_mixed(
    groups: Sequence[ScoredGroup], config: CreditConfig, *, rewards: Mapping[str, float], **options: Any
) -> Assignment:
    """Advantages of all groups of an iteration, mixed as `config.mixture` says.

        advantages: A = sum_r w_r A_r, A_r the advantages of reward r alone, clamped (MixGRPO, arXiv 2507.21802)

    MixGRPO divides the weights by their sum and clamps the mixture instead; here weights are taken as they are given.
    A point that one reward could not score is masked in all of them. Rewards and step rewards are the mixture's.

    Args:
        rewards: weight of each reward that trains.
        options: of `assign_credit`.

    Raises:
        ContractError: a group is incomplete, or lacks a reward's scores.
    """
    mixture = assign_credit(groups, config, **options)
    if config.mixture == "rewards":
        return mixture
    parts = [
        (weight, assign_credit([of_reward(group, name) for group in groups], config, **options).groups)
        for name, weight in rewards.items()
    ]
    mixed = tuple(
        replace(
            group, advantages=torch.stack([weight * credited[place].advantages for weight, credited in parts]).sum(0)
        )
        for place, group in enumerate(mixture.groups)
    )
    return replace(mixture, groups=mixed)


def of_reward(group: ScoredGroup, name: str) -> ScoredGroup:
    """The same group as if reward `name` were all there is.

    Raises:
        ContractError: its images were scored, but not by that reward.
    """
    shards = tuple(replace(shard, scores=_alone(shard.scores, name)) for shard in group.shards)
    return replace(group, shards=shards)


def reward_gains(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean and mean size of each reward's gains by step, `gain/<reward>/step_<k>_mean` and `_abs_mean`.

    Nothing for a single reward, whose gains the mixture's metrics show, and where only final images were scored.
    """
    shards = [(shard, group.shards[0].scores) for group in groups for shard in group.shards]
    names = sorted({name for shard, _ in shards for name in shard.scores.components if "/" not in name})
    found: dict[tuple[str, int], list[np.ndarray]] = {}
    for shard, first in shards if len(names) > 1 else []:
        steps = shard.rollout.steps
        for name in names:
            points = _points(shard.scores, first, name, shard.rollout.image_index)
            for column, k in enumerate(steps if points.shape[1] == len(steps) + 1 else ()):
                gains = points[:, column + 1] - points[:, column]
                found.setdefault((name, k), []).append(gains[np.isfinite(gains)])
    metrics = {}
    for (name, k), parts in found.items():
        gains = np.concatenate(parts)
        if len(gains):
            metrics[f"gain/{name}/step_{k}_mean"] = float(gains.mean())
            metrics[f"gain/{name}/step_{k}_abs_mean"] = float(np.abs(gains).mean())
    return metrics


def _alone(scores: Scores, name: str) -> Scores:
    if not scores.valid.any():
        return scores
    if name not in scores.components:
        raise ContractError(f"credit.mixture advantages needs a score of every reward, got none of {name!r}")
    return replace(scores, values=scores.components[name])


def _points(scores: Scores, first: Scores, name: str, index: np.ndarray) -> np.ndarray:
    """One reward at each point [N, P], NaN where missing; `COMMON_IMAGE` is the first shard's first image."""
    values, common = (
        part.components.get(name, np.full(len(part.reasons), np.nan, np.float32)) for part in (scores, first)
    )
    return np.where(index == COMMON_IMAGE, common[0], values[index])
