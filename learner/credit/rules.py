"""Credit rules: from the rewards of a trajectory's points to one step reward for each stochastic step.

A rule takes rewards [M, P] of M trajectories at P = S+1 points, the finished image's last, and returns step rewards
[M, S]. NaN stands for a missing reward, and for a step reward that would need one. `along_windows` applies a rule to
tables with a column for every step of the schedule. `docs/method/` and the tests show worked numbers.
TP-GRPO's rule, which looks at all groups of an iteration, is in `learner/credit/turning_point.py`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CreditRule = Callable[[Float[Tensor, "M P"]], Float[Tensor, "M S"]]


def along_windows(
    rule: CreditRule, rewards: Float[Tensor, "G N P"], explored: Bool[Tensor, "G N T"]
) -> Float[Tensor, "G N T"]:
    """Apply a rule to each trajectory's explored points: those before its stochastic steps, and the finished image.

    Args:
        rule: takes the points of trajectories that explored the same steps.
        rewards: P = T+1, NaN where missing.
        explored: which steps of the schedule each trajectory took stochastically.

    Returns:
        Step rewards, NaN for steps that a trajectory did not explore.
    """
    values = rewards.new_full(explored.shape, torch.nan)
    for window in explored.flatten(0, 1).unique(dim=0):
        rows = (explored == window).all(-1)
        points = torch.cat([window, window.new_ones(1)])
        values[rows.unsqueeze(-1) & window] = rule(rewards[rows][:, points]).flatten()
    return values


def uniform(rewards: Float[Tensor, "M P"]) -> Float[Tensor, "M S"]:
    """Flow-GRPO (arXiv 2505.05470): every step earns the finished image's reward, r_S. No other point is read."""
    return rewards[:, -1:].repeat(1, rewards.shape[1] - 1)


def gains(rewards: Float[Tensor, "M P"]) -> Float[Tensor, "M S"]:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): each step earns what it changed, g_k = r_{k+1} - r_k.

    The gains of a trajectory sum to its final reward minus its first point's. A missing reward voids both gains
    that touch it.
    """
    return rewards[:, 1:] - rewards[:, :-1]


def gae(rewards: Float[Tensor, "M P"], *, decay: float) -> Float[Tensor, "M S"]:
    """Generalised advantage estimation (arXiv 1506.02438) with the points' rewards as values: sum_l decay^l g_{k+l}.

    With V(x_k) = r_k and no discount the temporal difference is the gain itself. decay 0 gives `gains`; decay 1 gives
    all that follows, r_S - r_k, and needs these two rewards only. Between them every reward from k on is needed. How
    Stepwise-Flow-GRPO's variant sets it is not public.

    Args:
        decay: lambda in [0, 1].
    """
    if decay == 1:
        return rewards[:, -1:] - rewards[:, :-1]
    values = gains(rewards)
    if decay:
        for k in range(values.shape[1] - 2, -1, -1):
            values[:, k] += decay * values[:, k + 1]
    return values


def calibrated(rewards: Float[Tensor, "G N P"]) -> tuple[Float[Tensor, "G N P"], Float[Tensor, " T"]]:
    """Value calibration: what each point is worth, V_k, in place of its reward, and the slopes b_k.

        d_k = r_k - mean over the group's members at point k
        b_k = clip(sum d_k d_S / sum d_k^2, 0, 1) over all members of all groups of the iteration,   b_S = 1
        V_k = b_k d_k

    Ours: the least-squares prediction of the final reward from a point's, about the group's mean. A completion is one
    deterministic guess at what a point is worth. Rule-based scores make it a coin flip, and early guesses say little;
    neighbouring gains of raw rewards then mostly cancel. With slopes of 1 gains differ from the plain ones by a
    constant of each step. A point that predicts nothing has slope 0, and does not judge the step before it.

    Args:
        rewards: all groups of the iteration; NaN where missing, and at points that a trajectory did not explore.

    Returns:
        Values, NaN where the reward is; slopes, NaN for a step without a pair of scores, and 0 where a point's rewards
        are all equal.
    """
    total = rewards.shape[-1] - 1
    above, below = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64)
    seen = torch.zeros(total, dtype=torch.bool)
    tables = rewards.double()
    for table in tables:
        for k in range(total):
            both = ~table[:, [k, -1]].isnan().any(1)
            own = lead(table[both, k])
            above[k] += (own * lead(table[both, -1])).sum()
            below[k] += own.square().sum()
            seen[k] |= both.any()
    slopes = torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0).clamp(0, 1)
    slopes[~seen] = torch.nan
    leads = torch.stack([torch.stack([lead(column) for column in table.unbind(1)], dim=1) for table in tables])
    return (leads * torch.cat([slopes, slopes.new_ones(1)])).float(), slopes


def lead(values: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Values about their mean; exactly 0 where all are equal. NaN stays NaN and is in no mean."""
    known = values[~values.isnan()]
    if len(known) and known.max() > known.min():
        return values - known.mean()
    return torch.where(values.isnan(), values, 0.0)
