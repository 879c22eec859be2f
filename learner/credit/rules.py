"""The formulas of credit: from the rewards of a trajectory's points to step rewards, and from these to advantages.

A rule takes rewards [M, P] of M trajectories at P = S+1 points, the finished image's last, and returns step rewards
[M, S]. NaN stands for a missing reward, and for a step reward that would need one. `along_windows` applies a rule to
tables with a column for every step of the schedule. `docs/method/` and the tests show worked numbers.
TP-GRPO's rule, which looks at all groups of an iteration, is in `learner/credit/turning_point.py`.

A normaliser turns the step rewards [N, K] of one group into advantages, float32; a missing step reward gets 0. Its
signature is `normaliser(values, epsilon=, ddof=, pool=)`. `pool` holds the step rewards [M, K] of all groups of the
iteration, over which the std is taken instead of over the group's own. Statistics are taken in float64. Values that are
all equal have nothing to compare: their advantages are exactly 0.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CreditRule = Callable[[Float[Tensor, "M P"]], Float[Tensor, "M S"]]
Normaliser = Callable[..., Float[Tensor, "N K"]]


def along_windows(
    rule: CreditRule,
    rewards: Float[Tensor, "G N P"],
    explored: Bool[Tensor, "G N T"],
    skipped: Bool[Tensor, "G N T"] | None = None,
) -> Float[Tensor, "G N T"]:
    """Apply a rule to each trajectory's explored points: those before its stochastic steps, and the finished image.

    The rule does not see the points that are skipped. Its step reward between two scored points is divided equally
    among the stochastic steps between them.

    Args:
        rule: takes the points of trajectories that explored the same steps.
        rewards: rewards of the points, P = T+1, NaN where missing.
        explored: which steps of the schedule each trajectory took stochastically.
        skipped: which points before these steps have no image, never the first; None if there are none.

    Returns:
        Step rewards, NaN for steps that a trajectory did not explore.
    """
    values = rewards.new_full(explored.shape, torch.nan)
    scored = explored if skipped is None else explored & ~skipped
    ways = torch.cat([explored, scored], dim=-1)
    for way in ways.flatten(0, 1).unique(dim=0):
        rows, (window, own) = (ways == way).all(-1), way.chunk(2)
        points = torch.cat([own, own.new_ones(1)])
        part = own[window].cumsum(0) - 1
        shares = rule(rewards[rows][:, points]) / part.bincount(minlength=int(own.sum()))
        values[rows.unsqueeze(-1) & window] = shares[:, part].flatten()
    return values


def uniform(rewards: Float[Tensor, "M P"]) -> Float[Tensor, "M S"]:
    """Flow-GRPO (arXiv 2505.05470): every step earns the finished image's reward, r_S. No other point is read."""
    return rewards[:, -1:].repeat(1, rewards.shape[1] - 1)


def gains(rewards: Float[Tensor, "M P"]) -> Float[Tensor, "M S"]:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): each step earns its change of the reward, g_k = r_{k+1} - r_k.

    The gains of a trajectory sum to its final reward minus its first point's. A missing reward voids both gains
    that touch it.
    """
    return rewards[:, 1:] - rewards[:, :-1]


def gae(rewards: Float[Tensor, "M P"], *, decay: float) -> Float[Tensor, "M S"]:
    """Generalised advantage estimation (arXiv 1506.02438) with the points' rewards as values: sum_l decay^l g_{k+l}.

    With V(x_k) = r_k and no discount the temporal difference is the gain itself. decay 0 gives `gains`; decay 1 gives
    the sum of all gains from k on, r_S - r_k, and needs these two rewards only. A decay between needs every reward from
    k on. The decay of Stepwise-Flow-GRPO's variant is not public.

    Args:
        rewards: rewards of M trajectories at P points.
        decay: lambda in [0, 1].

    Returns:
        Step rewards [M, S] with S = P - 1; NaN where a reward that they need is missing.
    """
    if decay == 1:
        return rewards[:, -1:] - rewards[:, :-1]
    values = gains(rewards)
    if decay:
        for k in range(values.shape[1] - 2, -1, -1):
            values[:, k] += decay * values[:, k + 1]
    return values


def lineage(strides: Mapping[int, int], *, members: int, total: int) -> tuple[Int[Tensor, "N T"], Int[Tensor, "N T"]]:
    """Return each member's branch and parent at each step, in a shard whose branches split into two.

    All members are in one state at first, so the parent of the widest branches is the whole shard.

    Args:
        strides: by step, how many neighbouring members share it; 1 for a step that is not named.
        members: N, those of the shard.
        total: T.

    Returns:
        Indices of the first members of branch and parent. The last ones may have fewer members.
    """
    widest = max(strides.values(), default=1)
    widths = [strides.get(k, 1) for k in range(total)]
    member = torch.arange(members).unsqueeze(1)
    branch, parent = (
        torch.tensor(each) for each in (widths, [members if width == widest else 2 * width for width in widths])
    )
    return member // branch * branch, member // parent * parent


def tree(
    finals: Float[Tensor, "G N"],
    explored: Bool[Tensor, "G N T"],
    *,
    branches: Int[Tensor, "G N T"],
    parents: Int[Tensor, "G N T"],
) -> tuple[Float[Tensor, "G N T"], Float[Tensor, "G N T"]]:
    """BranchGRPO (arXiv 2509.06040): a step earns the mean final reward of all members that share it.

    That mean is a Monte-Carlo value of the state after the step, without a completion. The mean of its parent's other
    members is one of the state in which the branch separated from them.

    Args:
        finals: rewards of the finished images; a missing one is in no mean.
        explored: which steps are stochastic.
        branches: each member's branch at each step, the index of its first member.
        parents: likewise the members that were in one state when the branch last separated from others.

    Returns:
        The mean of each branch, and that of its parent's other members. NaN for all but the branch's first member, and
        where no member has a score.
    """
    known, scores = ~finals.isnan(), finals.double().nan_to_num()

    def mean_over(chosen: Bool[Tensor, "G N N"]) -> Float[Tensor, "G N"]:
        scored = chosen & known.unsqueeze(1)
        return (scored * scores.unsqueeze(1)).sum(-1) / scored.sum(-1)

    means, others = finals.new_full((2, *explored.shape), torch.nan)
    is_first = branches == torch.arange(finals.shape[1]).view(1, -1, 1)
    for k in explored.flatten(0, 1).any(0).nonzero().flatten().tolist():
        own, family = (each[:, :, None, k] == each[:, None, :, k] for each in (branches, parents))
        means[..., k], others[..., k] = mean_over(own), mean_over(family & ~own)
    trained = explored & is_first
    return torch.where(trained, means, torch.nan), torch.where(trained, others, torch.nan)


def judged(
    means: Float[Tensor, "G N T"],
    others: Float[Tensor, "G N T"],
    finals: Float[Tensor, "G N"],
) -> tuple[Float[Tensor, "G N T"], Float[Tensor, " T"]]:
    """Calibrated trees: a step earns its branch's mean minus the part of it that the parent's other members predict.

        d_k = mean of the branch - m,   o_k = mean of its parent's other members - m,   m the mean of the group
        b_k = clip(sum d_k o_k / sum o_k^2, 0, 1) over all branches of the iteration at step k
        step k earns d_k - b_k o_k

    This method is ours. A step should not earn the quality of the state in which its branch begins. The other members
    that left this state show that quality. They do not depend on the noise of the step, so the expected gradient is
    that of d_k alone, and the least-squares slope makes its variance smallest. b_k is 0 if the state predicts nothing.

    Args:
        means: from `tree`.
        others: from `tree`.
        finals: rewards of the finished images.

    Returns:
        Step rewards, NaN where the mean is; slopes, NaN for a step without a branch that has others.
    """
    centre = finals.double().nanmean(1).view(-1, 1, 1)
    own, rest = means.double() - centre, others.double() - centre
    both = ~(own.isnan() | rest.isnan())
    above, below = (torch.where(both, product, 0.0).sum((0, 1)) for product in (own * rest, rest.square()))
    slopes = _slopes(above, below, both.any(1).any(0))
    return (own - slopes.nan_to_num() * rest.nan_to_num()).float(), slopes


def calibrated(rewards: Float[Tensor, "G N P"]) -> tuple[Float[Tensor, "G N P"], Float[Tensor, " T"]]:
    """Value calibration: a value V_k for each point in place of its reward, and the slopes b_k.

        d_k = r_k - mean over the group's members at point k
        b_k = clip(sum d_k d_S / sum d_k^2, 0, 1) over all members of all groups of the iteration,   b_S = 1
        V_k = b_k d_k

    Ours: the least-squares prediction of the final reward from a point's, both relative to the group's mean. A
    completion is one deterministic guess at the value of a point. With rule-based scores it is a coin flip, and early
    guesses say little; neighbouring gains of raw rewards then mostly cancel. With slopes of 1 the gains differ from the
    plain ones by a constant for each step. A point that predicts nothing has slope 0, and does not judge the step
    before it.

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
            own = deviations(table[both, k])
            above[k] += (own * deviations(table[both, -1])).sum()
            below[k] += own.square().sum()
            seen[k] |= both.any()
    slopes = _slopes(above, below, seen)
    differences = torch.stack([_column_deviations(table) for table in tables])
    return (differences * torch.cat([slopes, slopes.new_ones(1)])).float(), slopes


def _slopes(above: Float[Tensor, " T"], below: Float[Tensor, " T"], seen: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return clip(above / below, 0, 1), NaN for a step that is not seen."""
    slopes = torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0).clamp(0, 1)
    slopes[~seen] = torch.nan
    return slopes


def present(values: Float[Tensor, "*B"]) -> Float[Tensor, " M"]:
    """Return the values that are not missing."""
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

    Args:
        values: g, the group's step rewards.
        epsilon: added to the std; 1e-4 in Flow-GRPO.
        ddof: delta degrees of freedom of the std.
        pool: step rewards of the iteration that the std is taken over.

    Returns:
        A, 0 where g is missing.
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

    Args:
        values: g, the group's step rewards.
        epsilon: added to each std.
        ddof: delta degrees of freedom of each std.
        pool: step rewards of the iteration that the stds are taken over.

    Returns:
        A, 0 where g is missing.
    """
    steps = values.split(1, dim=1)
    pools = [None] * len(steps) if pool is None else pool.split(1, dim=1)
    columns = [joint(step, epsilon=epsilon, ddof=ddof, pool=own) for step, own in zip(steps, pools, strict=True)]
    return torch.cat(columns, dim=1)


def centred(
    values: Float[Tensor, "N K"], *, epsilon: float, ddof: int = 0, pool: Float[Tensor, "M K"] | None = None
) -> Float[Tensor, "N K"]:
    """A = (g_k - m_k) / (s + epsilon) with each step's own mean and one std of all differences.

    Ours: with `joint`, a step whose gains are mostly of one sign gives every member an advantage of that sign. In the
    pool each step's mean is taken over the pool.

    Args:
        values: g, the group's step rewards.
        epsilon: added to the std.
        ddof: delta degrees of freedom of the std.
        pool: step rewards of the iteration that the std is taken over.

    Returns:
        A, 0 where g is missing.
    """
    pooled = None if pool is None else _column_deviations(pool)
    return _scaled(_column_deviations(values), epsilon=epsilon, ddof=ddof, pool=pooled)


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
        values: g, the group's step rewards.
        baseline: b, known for every step that has a step reward.
        epsilon: added to the std.
        ddof: delta degrees of freedom of the std.
        pool: step rewards of the iteration that the std is taken over.

    Returns:
        A, 0 where g is missing.
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


def _column_deviations(values: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
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
