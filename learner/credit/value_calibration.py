"""Calibrated values: how much of a completed point's lead will still be there in the finished image?

A completion is one deterministic guess at what a point is worth. Rule-based scores turn it into a coin flip, and early
guesses say little; taken as they are, neighbouring gains then mostly cancel. Scaled by the slope with which the final
rewards follow them they become the best linear prediction of the final reward.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Points = tuple[Float[Tensor, "N P"], Bool[Tensor, "N P"], tuple[int, ...]]
"""Rewards at a shard's points, the finished images' last; which are valid; the steps before which the points lie."""


def calibrated(
    groups: Sequence[Sequence[Points]], total: int
) -> tuple[list[list[Float[Tensor, "N P"]]], Float[Tensor, " T"]]:
    """Values V_k of all points in place of their rewards, and the slopes b_k.

        d_k = r_k - mean over the group's members at point k
        b_k = clip(sum d_k d_S / sum d_k^2, 0, 1) over all members of all groups of the iteration,   b_S = 1
        V_k = b_k d_k

    Ours: the least-squares prediction of the final reward from a point's, about the group's mean. With slopes of 1
    gains differ from the plain ones by a constant of each step; a point that tells nothing has slope 0, and the step
    that led there is not judged by it.

    Args:
        groups: shards of each group of the iteration.
        total: T, columns of the slopes.

    Returns:
        Values shaped as the rewards, NaN where invalid; slopes, NaN for a step without a pair of scores, and 0 where
        a point's rewards are all equal.
    """
    above, below = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64)
    seen = torch.zeros(total, dtype=torch.bool)
    for shards in groups:
        for k, (values, final) in _columns(shards).items():
            lead = _lead(values, values)
            above[k] += (lead * _lead(final, final)).sum()
            below[k] += lead.square().sum()
            seen[k] |= len(values) > 0
    slopes = torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0).clamp(0, 1)
    slopes[~seen] = torch.nan
    return [_values(shards, slopes) for shards in groups], slopes


def _columns(shards: Sequence[Points]) -> dict[int, tuple[Float[Tensor, " M"], Float[Tensor, " M"]]]:
    """By step: rewards of the point and of the finished image, of the members that have both."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for rewards, valid, steps in shards:
        for place, k in enumerate(steps):
            both = valid[:, place] & valid[:, -1]
            found.setdefault(k, []).append((rewards[both, place].double(), rewards[both, -1].double()))
    return {k: (torch.cat([v for v, _ in parts]), torch.cat([f for _, f in parts])) for k, parts in found.items()}


def _values(shards: Sequence[Points], slopes: Float[Tensor, " T"]) -> list[Float[Tensor, "N P"]]:
    """One group's values."""
    finals = torch.cat([rewards[valid[:, -1], -1] for rewards, valid, _ in shards]).double()
    peers: dict[int, list[Tensor]] = {}
    for rewards, valid, steps in shards:
        for place, k in enumerate(steps):
            peers.setdefault(k, []).append(rewards[valid[:, place], place].double())
    tables = []
    for rewards, valid, steps in shards:
        points = [slopes[k] * _lead(rewards[:, place].double(), torch.cat(peers[k])) for place, k in enumerate(steps)]
        leads = torch.stack([*points, _lead(rewards[:, -1].double(), finals)], dim=1)
        tables.append(torch.where(valid, leads, torch.nan).float())
    return tables


def _lead(values: Float[Tensor, " M"], peers: Float[Tensor, " R"]) -> Float[Tensor, " M"]:
    """Values about their peers' mean; exactly 0 where all peers are equal."""
    if len(peers) and peers.max() > peers.min():
        return values - peers.mean()
    return torch.zeros_like(values)
