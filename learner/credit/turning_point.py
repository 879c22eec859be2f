"""TP-GRPO's credit (arXiv 2602.06422): a step at which a trajectory turns around earns all gains from there on.

With rewards R_0 ... R_S at the points, gains d_k = R_k - R_{k-1} (k = 1 ... S), D = R_S - R_0 and
s_k = sign(d_k) sign(D), where sign(0) = 0:

    turning point   k >= 2, s_{k-1} < 0 and s_k > 0                          Definition 4.1
    consistent      also sign(d_k) sign(R_S - R_k) > 0                       Definition 5.1: |r_agg| > |d_k|
    first step      s_1 > 0; consistent: sign(d_1) sign(R_S - R_1) > 0       Remark 5.2
    aggregate       r_agg,k = R_S - R_{k-1}, which replaces d_k unless it is 0, as in the published code

Columns count from 0: column k - 1 is the step from point k - 1 to point k. The last step is never consistent, since
nothing follows it.
"""

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learner.credit.tables import along_windows


def turning_point(
    rewards: Float[Tensor, "G N P"],
    explored: Bool[Tensor, "G N T"],
    *,
    is_consistent: bool,
    has_first_step: bool,
    is_balanced: bool,
) -> Float[Tensor, "G N T"]:
    """Compute the step rewards of all groups of an iteration: aggregates at turning points, gains elsewhere.

    Args:
        rewards: rewards of the points, P = T+1, NaN where missing.
        explored: which steps of the schedule each trajectory took stochastically.
        is_consistent: select by Definition 5.1 too.
        has_first_step: select a trajectory's first stochastic step by Remark 5.2.
        is_balanced: keep as many positive as negative aggregates of the iteration, see `balanced`.

    Returns:
        Step rewards, NaN where a gain is missing, and for steps that a trajectory did not explore.
    """
    rule = partial(aggregates, is_consistent=is_consistent, has_first_step=has_first_step)
    selected = along_windows(rule, rewards, explored)
    if is_balanced:
        selected = balanced(selected)
    gains = along_windows(partial(torch.diff, dim=1), rewards, explored)
    return torch.where(selected.isnan(), gains, selected)


def aggregates(rewards: Float[Tensor, "M P"], *, is_consistent: bool, has_first_step: bool) -> Float[Tensor, "M S"]:
    """Compute the aggregates of the turning points; NaN at all other steps.

    Args:
        rewards: NaN where missing; a sign that needs a missing reward is 0, so it selects nothing.
        is_consistent: select by Definition 5.1 too.
        has_first_step: select the first step by Remark 5.2.

    Returns:
        R_S - R_{k-1} in the columns of the selected steps, where it is not 0.
    """
    final, changes = rewards[:, -1:], _sign(rewards.diff(dim=1))
    agrees = changes * _sign(final - rewards[:, :1])
    selected = torch.zeros_like(agrees, dtype=torch.bool)
    selected[:, 1:] = (agrees[:, :-1] < 0) & (agrees[:, 1:] > 0)
    if has_first_step:
        selected[:, 0] = agrees[:, 0] > 0
    if is_consistent:
        selected &= changes * _sign(final - rewards[:, 1:]) > 0
    earned = final - rewards[:, :-1]
    return torch.where(selected & (earned != 0), earned, torch.nan)


def balanced(selected: Float[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Keep as many positive as negative aggregates of an iteration: the largest of each sign. The others become NaN.

    If one sign is absent, all stay. Sign and rank come from r_agg, ties by (group, member, step). The published code
    takes both from R_S - R_0 and balances on each device, so it depends on the number of devices. The two signs differ
    only without consistency: then a trajectory may turn and yet end on the other side of R_{k-1}.
    """
    flat = selected.flatten()
    sides = [side.nonzero().flatten() for side in (flat > 0, flat < 0)]
    count = min(len(side) for side in sides)
    if not count:
        return selected
    kept = torch.full_like(flat, torch.nan)
    for side in sides:
        largest = side[flat[side].abs().argsort(descending=True, stable=True)[:count]]
        kept[largest] = flat[largest]
    return kept.view_as(selected)


def _sign(values: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    """Return the signs, 0 for missing values."""
    return torch.nan_to_num(values, nan=0.0).sign()
