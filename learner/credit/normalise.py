"""From the step rewards of one group to advantages, float32 [N, K]; 0 where a step reward is invalid.

Every normaliser has the signature `normaliser(values, valid, epsilon=, ddof=, pool=)`. `pool` holds the values that
the std is taken over instead of the group's own, (values [M, K], valid [M, K]) of all groups of the iteration.
Statistics are taken in float64. Values that are all equal have nothing to compare: their advantages are exactly 0.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Normaliser = Callable[..., Float[Tensor, "N K"]]
Pool = tuple[Float[Tensor, "M K"], Bool[Tensor, "M K"]]


def joint(
    values: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Pool | None = None
) -> Float[Tensor, "N K"]:
    """A = (g - m) / (s + epsilon) with mean m and std s over all valid members and steps of the group.

    Stepwise-Flow-GRPO (arXiv 2603.28718); on `uniform` step rewards it is Flow-GRPO's per-prompt normalisation
    (arXiv 2505.05470), with a pool its `global_std`: the mean stays the prompt's own.

    Args:
        epsilon: added to the std; 1e-4 in Flow-GRPO.
        ddof: degrees of freedom taken from the std.
    """
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    kept = values[valid].double()
    if _differ(kept):
        over = kept if pool is None else pool[0][pool[1]].double()
        advantages[valid] = (kept - kept.mean()) / (over.std(correction=ddof) + epsilon)
    return advantages.float()


def per_step(
    values: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Pool | None = None
) -> Float[Tensor, "N K"]:
    """A = (g_k - m_k) / (s_k + epsilon) with the mean and std of each step over the members.

    The ablation of Stepwise-Flow-GRPO, the advantage of DenseGRPO (arXiv 2601.20218, equation 10) and of TP-GRPO
    (arXiv 2602.06422); with ddof 1 and epsilon 1e-8 on `uniform` step rewards DanceGRPO's (arXiv 2505.07818).
    """
    columns = []
    for k in range(values.shape[1]):
        own = slice(k, k + 1)
        over = None if pool is None else (pool[0][:, own], pool[1][:, own])
        columns.append(joint(values[:, own], valid[:, own], epsilon=epsilon, ddof=ddof, pool=over))
    return torch.cat(columns, dim=1)


def centred(
    values: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Pool | None = None
) -> Float[Tensor, "N K"]:
    """A = (g_k - m_k) / (s + epsilon) with each step's own mean and one std of what remains.

    Ours: `joint` leaves a step whose gains are mostly of one sign with advantages of that sign for every member. The
    pool's remainders are about the steps' means over the pool.
    """
    remainder = _without_step_means(values, valid)
    pooled = None if pool is None else (_without_step_means(*pool), pool[1])
    return _scaled(remainder, valid, epsilon=epsilon, ddof=ddof, pool=pooled)


def from_baseline(
    values: Float[Tensor, "N K"],
    valid: Bool[Tensor, "N K"],
    *,
    baseline: Float[Tensor, " K"],
    epsilon: float,
    ddof: int = 0,
    pool: Pool | None = None,
) -> Float[Tensor, "N K"]:
    """A = (g_k - b_k) / (s + epsilon) with a baseline of each step and the std s of what remains, no further mean.

    Stepwise-Flow-GRPO names an EMA baseline without its formula; this one is ours. See `updated_baseline`.

    Args:
        baseline: b.
    """
    if not _differ(values[valid]):
        return torch.zeros(values.shape)
    pooled = None if pool is None else (pool[0].double() - baseline.double(), pool[1])
    return _scaled(values.double() - baseline.double(), valid, epsilon=epsilon, ddof=ddof, pool=pooled)


def updated_baseline(
    baseline: Float[Tensor, " K"] | None, values: Float[Tensor, "M K"], valid: Bool[Tensor, "M K"], *, decay: float
) -> Float[Tensor, " K"]:
    """b_k <- decay b_k + (1 - decay) mean(g_k) over all valid gains of the iteration; a step's first mean as it is.

    Args:
        baseline: b, NaN for a step that has not been seen; None before the first iteration.
        values: step rewards of all groups.
    """
    counts = valid.sum(0)
    means = torch.where(valid, values.double(), 0.0).sum(0) / counts
    if baseline is None:
        return means
    blended = torch.where(baseline.isnan(), means, decay * baseline + (1 - decay) * means)
    return torch.where(counts > 0, blended, baseline)


def _without_step_means(values: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    remainder = torch.zeros(values.shape, dtype=torch.float64)
    for k in range(values.shape[1]):
        kept = values[:, k][valid[:, k]].double()
        if _differ(kept):
            remainder[:, k] = values[:, k].double() - kept.mean()
    return remainder


def _scaled(
    remainder: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, epsilon: float, ddof: int, pool: Pool | None
) -> Float[Tensor, "N K"]:
    advantages = torch.zeros(remainder.shape, dtype=torch.float64)
    kept = remainder[valid]
    if _differ(kept):
        over = kept if pool is None else pool[0][pool[1]]
        advantages[valid] = kept / (over.std(correction=ddof) + epsilon)
    return advantages.float()


def _differ(kept: Float[Tensor, " M"]) -> bool:
    return bool(len(kept) and kept.max() > kept.min())


NORMALISERS: Mapping[str, Normaliser] = {"joint": joint, "per_step": per_step, "centred": centred, "ema": from_baseline}
"""Normaliser by its name in the config."""
