"""Measures against reward hacking (GARDO, arXiv 2512.24138): which members the KL term restrains, and diversity."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from protocol.errors import ContractError

ROUNDING = 1e-3
"""Distances of equal images may lie this far below 0, by rounding."""


def rank_shares(scores: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the share of the other members whose score is lower, ties as halves; NaN where a score is missing."""
    known = ~scores.isnan()
    lower = (scores[:, None] > scores[None, :]).double() + 0.5 * (scores[:, None] == scores[None, :]).double()
    others = known.sum() - 1
    shares = (lower.sum(1) - 0.5) / others if others > 0 else torch.full(scores.shape, 0.5, dtype=torch.float64)
    return torch.where(known, shares, torch.nan)


def doubtful(reward: Float[Tensor, " N"], auxiliary: Float[Tensor, "A N"], *, share: float) -> Bool[Tensor, " N"]:
    """Choose the members whose reward ranks highest compared with the auxiliary scorers.

        u_i = rank_shares(reward)_i - mean over auxiliary scorers of rank_shares(score)_i

    Args:
        reward: rewards of a group's finished images.
        auxiliary: scores of the same images by scorers that are hardly or not at all trained on.
        share: largest share of the members that are chosen.

    Returns:
        The ceil(share N) members with the largest u above 0; of equal ones the first. A member without a score is
        never chosen.
    """
    doubt = rank_shares(reward) - torch.stack([rank_shares(each) for each in auxiliary]).mean(0)
    doubt = torch.where(doubt.isnan(), -math.inf, doubt.round(decimals=9))  # equal ranks add up to equal bits
    most = doubt.argsort(descending=True, stable=True)[: math.ceil(share * len(doubt) - 1e-9)]
    chosen = torch.zeros(len(doubt), dtype=torch.bool)
    chosen[most] = True
    return chosen & (doubt > 0)


def scaled_by_distance(advantages: Float[Tensor, "N T"], distances: Float[Tensor, " N"]) -> Float[Tensor, "N T"]:
    """Scale the advantages above 0 by how far a member lies from its group: A d_i / mean(d).

    So among equally good images the ones that differ from the rest gain weight, and a group of similar images does not
    become more similar. The mean is over the members that have a distance; without a distance the factor is 1.

    Args:
        distances: d of each member, at least 0 up to rounding.

    Returns:
        The scaled advantages; those up to 0 are unchanged.

    Raises:
        ContractError: a number is below 0, so it is no distance; it would turn a good image into a bad one.
    """
    known = distances[~distances.isnan()].double()
    if (known < -ROUNDING).any():
        raise ContractError(
            f"credit.diversity must name a reward of distances, which are at least 0, got {known.min().item():.4g}:"
            " name one with the scorer diversity"
        )
    mean = known.clamp(min=0).mean()
    if not mean > 0:
        return advantages
    factors = torch.where(distances.isnan(), 1.0, distances.double().clamp(min=0) / mean).float().unsqueeze(1)
    return torch.where(advantages > 0, advantages * factors, advantages)
