"""Normalisers: the step rewards g [N, K] of one group become advantages A [N, K], float32; 0 where g is missing.

Their signature is `normaliser(values, epsilon=, ddof=, pool=)`: `values` is g, `epsilon` is added to the std (1e-4 in
Flow-GRPO), and `ddof` is its delta degrees of freedom. With a `pool`, the step rewards [M, K] of all groups of the
iteration, the std is the pool's instead of the group's. Statistics are taken in float64. Values that are all equal have
nothing to compare: their advantages are exactly 0.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

Normaliser = Callable[..., Float[Tensor, "N K"]]


def present(values: Float[Tensor, "*B"]) -> Float[Tensor, " M"]:
    return values[~values.isnan()]


def deviations(values: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Return the values minus their mean; exactly 0 if all are equal. NaN stays NaN and is in no mean."""
    known = present(values)
    if _differ(known):
        return values - known.mean()
    return torch.where(values.isnan(), values, 0.0)


def joint(
    values: Float[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Float[Tensor, "M K"] | None = None
) -> Float[Tensor, "N K"]:
    """A = (g - m) / (s + epsilon) with mean m and std s over all members and steps of the group.

    Stepwise-Flow-GRPO (arXiv 2603.28718); on `uniform` step rewards it is Flow-GRPO's per-prompt normalisation
    (arXiv 2505.05470), with a pool its `global_std`: the mean stays the prompt's own.
    """
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    kept = present(values).double()
    if _differ(kept):
        over = kept if pool is None else present(pool).double()
        advantages[~values.isnan()] = (kept - kept.mean()) / (over.std(correction=ddof) + epsilon)
    return advantages.float()


def per_step(
    values: Float[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Float[Tensor, "M K"] | None = None
) -> Float[Tensor, "N K"]:
    """A = (g_k - m_k) / (s_k + epsilon) with the mean and std of each step over the members.

    The ablation of Stepwise-Flow-GRPO, the advantage of DenseGRPO (arXiv 2601.20218, equation 10) and of TP-GRPO
    (arXiv 2602.06422); with ddof 1 and epsilon 1e-8 on `uniform` step rewards DanceGRPO's (arXiv 2505.07818).
    """
    steps = values.split(1, dim=1)
    pools = [None] * len(steps) if pool is None else pool.split(1, dim=1)
    columns = [joint(step, epsilon=epsilon, ddof=ddof, pool=over) for step, over in zip(steps, pools, strict=True)]
    return torch.cat(columns, dim=1)


def centred(
    values: Float[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Float[Tensor, "M K"] | None = None
) -> Float[Tensor, "N K"]:
    """A = (g_k - m_k) / (s + epsilon) with each step's own mean and one std of all differences.

    Ours: with `joint`, a step whose gains are mostly of one sign gives every member an advantage of that sign. The
    differences in the pool are from each step's mean over the pool.
    """
    pooled = None if pool is None else column_deviations(pool)
    return _scaled(column_deviations(values), epsilon=epsilon, ddof=ddof, pool=pooled)


def divided(values: Float[Tensor, "N K"], *, divisor: float) -> Float[Tensor, "N K"]:
    """A = (g_k - m_k) / c with each step's own mean and a given number c instead of a std.

    ELBO policy gradients (arXiv 2602.04663): beta / alpha = 1e-4 / 1e-3, so the divisor c is 10.
    """
    return (column_deviations(values).nan_to_num() / divisor).float()


def from_baseline(
    values: Float[Tensor, "N K"],
    *,
    baseline: Float[Tensor, " K"],
    epsilon: float,
    ddof: int = 0,
    pool: Float[Tensor, "M K"] | None = None,
) -> Float[Tensor, "N K"]:
    """A = (g_k - b_k) / (s + epsilon) with a baseline of each step and the std s of the differences, no further mean.

    Stepwise-Flow-GRPO names an EMA baseline without its formula; this one is ours. See `updated_baseline`.

    Args:
        baseline: b, known for every step that has a step reward.
    """
    if not _differ(present(values)):
        return torch.zeros(values.shape)
    pooled = None if pool is None else pool.double() - baseline.double()
    return _scaled(values.double() - baseline.double(), epsilon=epsilon, ddof=ddof, pool=pooled)


def updated_baseline(
    baseline: Float[Tensor, " K"] | None, values: Float[Tensor, "M K"], *, decay: float
) -> Float[Tensor, " K"]:
    """b_k <- decay b_k + (1 - decay) mean(g_k) over all step rewards of the iteration; the first b is the first mean.

    Args:
        baseline: b, NaN for a step that has not been seen; None before the first iteration.
        values: g, step rewards of all groups.
        decay: share of b that stays, in [0, 1].

    Returns:
        The next b, float64; NaN for a step that still has not been seen.
    """
    valid = ~values.isnan()
    counts = valid.sum(0)
    means = torch.where(valid, values.double(), 0.0).sum(0) / counts
    if baseline is None:
        return means
    blended = torch.where(baseline.isnan(), means, decay * baseline + (1 - decay) * means)
    return torch.where(counts > 0, blended, baseline)


def column_deviations(values: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Return the deviations of each column, in float64."""
    return torch.stack([deviations(column) for column in values.double().unbind(1)], dim=1)


def _scaled(
    remainder: Float[Tensor, "N K"], *, epsilon: float, ddof: int, pool: Float[Tensor, "M K"] | None
) -> Float[Tensor, "N K"]:
    advantages = torch.zeros(remainder.shape, dtype=torch.float64)
    kept = present(remainder)
    if _differ(kept):
        over = kept if pool is None else present(pool)
        advantages[~remainder.isnan()] = kept / (over.std(correction=ddof) + epsilon)
    return advantages.float()


def _differ(known: Float[Tensor, " M"]) -> bool:
    return bool(len(known) and known.max() > known.min())


NORMALISERS: Mapping[str, Normaliser] = {"joint": joint, "per_step": per_step, "centred": centred, "ema": from_baseline}
"""Normaliser by its name in the config."""
