"""Credit rules: from the rewards of the points to step rewards.

A rule is a function that takes rewards [M, P] of M trajectories at P = S+1 points, the finished image's last, and
returns step rewards [M, S]. NaN stands for a missing reward, and for a step reward that would need one. `step_rewards`
finds a rule by its name or by the import path of a function, and applies it to an iteration. `RULES` in
`protocol.config.credit` says what each rule needs. `tree` and `turning_point` look at whole tables instead.

`docs/method/credit.md` and the tests show worked numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from learner.credit.normalisers import column_deviations, deviations
from learner.credit.tables import CreditRule, RewardTables, along_windows
from learner.credit.turning_point import turning_point
from protocol.config.credit import CreditConfig, needs_of
from protocol.errors import ConfigError, ContractError, one_line
from protocol.ground.import_path import call_own, is_path


@dataclass(frozen=True)
class Earned:
    """What the steps of an iteration earn."""

    step_rewards: Float[Tensor, "G N T"]
    """NaN where it is not known."""
    slopes: Float[Tensor, " T"] | None = None
    """Slope of the final rewards on each point's rewards, for `tree` its b_k; None unless values are calibrated."""
    values: Float[Tensor, "G N P"] | None = None
    """Calibrated value of each point, NaN where its reward is; None unless the rule takes these."""


def step_rewards(tables: RewardTables, config: CreditConfig) -> Earned:
    """Apply the rule of the config to `tables.rewards`."""
    rewards, is_calibrated = tables.rewards, config.values == "calibrated" and needs_of(config.rule).uses_values
    if config.rule == "turning_point":
        choice = config.turning_point
        return Earned(
            turning_point(
                rewards,
                tables.explored,
                is_consistent=choice.is_consistent,
                has_first_step=choice.has_first_step,
                is_balanced=choice.is_balanced,
            )
        )
    if config.rule == "tree":
        finals = rewards[..., -1]
        means, others = tree(finals, tables.explored, branches=tables.branches, parents=tables.parents)
        return Earned(*calibrated_tree(means, others, finals)) if is_calibrated else Earned(means)
    values, slopes = calibrated(rewards) if is_calibrated else (None, None)
    points = rewards if values is None else values
    return Earned(along_windows(_rule_of(config), points, tables.explored, tables.skipped), slopes, values)


def _rule_of(config: CreditConfig) -> CreditRule:
    built_in: Mapping[str, CreditRule] = {
        "uniform": uniform,
        "gains": gains,
        "gae": partial(gae, decay=config.gae_lambda),
    }
    return built_in.get(config.rule) or partial(own_rule, config.rule)


def own_rule(path: str, rewards: Float[Tensor, "M P"]) -> Float[Tensor, "M S"]:
    """Apply the function at an import path.

    Raises:
        ContractError: it fails, or does not return M x S floats that are finite or NaN.
    """
    wanted = (rewards.shape[0], rewards.shape[1] - 1)
    earned = call_own("credit.rule", path, rewards.clone())
    if not isinstance(earned, Tensor) or earned.shape != wanted or not earned.is_floating_point():
        found = f"{earned.dtype} {list(earned.shape)}" if isinstance(earned, Tensor) else type(earned).__name__
        raise ContractError(
            f"credit.rule {path} must return step rewards {list(wanted)}, a tensor of floats, for rewards"
            f" {list(rewards.shape)}, got {found}"
        )
    earned = earned.to(rewards.dtype)
    if earned.isinf().any():
        raise ContractError(
            f"credit.rule {path} must return finite step rewards, or NaN for a missing one, got infinity"
        )
    return earned


def require_rule(config: CreditConfig) -> None:
    """Try a rule of the user's own on a few rewards.

    Raises:
        ConfigError: it cannot be found, fails, changes its answer, or mixes trajectories without saying so.
    """
    if not is_path(config.rule):
        return
    path, needs = config.rule, needs_of(config.rule)
    rewards = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.5, torch.nan, 0.3, 0.7], [0.2, 0.2, 0.2, 0.2]])
    if not needs.needs_points:
        rewards[:, :-1] = torch.nan
    try:
        whole, again = own_rule(path, rewards), own_rule(path, rewards)
        alone = torch.cat([own_rule(path, row) for row in rewards.split(1)])
        own_rule(path, rewards[:, -2:])
    except ContractError as error:
        raise ConfigError(one_line(error)) from error
    if not torch.allclose(whole, again, rtol=0, atol=0, equal_nan=True):
        raise ConfigError(
            f"credit.rule {path} must give the same step rewards for the same rewards, got different ones: take chance"
            " out of it"
        )
    if not needs.needs_iteration and not torch.allclose(whole, alone, equal_nan=True):
        raise ConfigError(
            f"credit.rule {path} must give a trajectory the same step rewards alone and among others, got different"
            f" ones: if it compares trajectories, write {path.rpartition(':')[2]}.needs_iteration = True"
        )


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
    k on. Stepwise-Flow-GRPO names GAE, but gives no decay.

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


def tree(
    finals: Float[Tensor, "G N"],
    explored: Bool[Tensor, "G N T"],
    *,
    branches: Int[Tensor, "G N T"],
    parents: Int[Tensor, "G N T"],
) -> tuple[Float[Tensor, "G N T"], Float[Tensor, "G N T"]]:
    """BranchGRPO (arXiv 2509.06040): a step earns the mean final reward of all members that share it.

    That mean is a Monte-Carlo value of the state after the step, without a completion. Likewise the mean of its
    parent's other members is a value of the state in which the branch separated from them.

    Args:
        finals: rewards of the finished images; a missing one is in no mean.
        branches: each member's branch at each step, the index of its first member.
        parents: likewise the members that were in one state when the branch last separated from others.

    Returns:
        The mean of each branch, and the mean of its parent's other members. NaN for all but the branch's first member,
        and where no member has a score.
    """
    known, scores = ~finals.isnan(), finals.double().nan_to_num()

    def mean_over(chosen: Bool[Tensor, "G N N"]) -> Float[Tensor, "G N"]:
        scored = chosen & known.unsqueeze(1)
        return (scored * scores.unsqueeze(1)).sum(-1) / scored.sum(-1)

    means, others = finals.new_full((2, *explored.shape), torch.nan)
    is_first = branches == torch.arange(finals.shape[1]).view(1, -1, 1)
    for k in explored.flatten(0, 1).any(0).nonzero().flatten().tolist():
        # [G, N, N]: whether two members share the branch, and whether they were in one state before it split.
        branch, family = (each[:, :, None, k] == each[:, None, :, k] for each in (branches, parents))
        means[..., k], others[..., k] = mean_over(branch), mean_over(family & ~branch)
    trained = explored & is_first
    return torch.where(trained, means, torch.nan), torch.where(trained, others, torch.nan)


def calibrated_tree(
    means: Float[Tensor, "G N T"],
    others: Float[Tensor, "G N T"],
    finals: Float[Tensor, "G N"],
) -> tuple[Float[Tensor, "G N T"], Float[Tensor, " T"]]:
    """Calibrated trees: a step earns its branch's mean minus the part of it that the parent's other members predict.

        d_k = mean of the branch - m,   o_k = mean of its parent's other members - m,   m the mean of the group
        b_k = clip(sum d_k o_k / sum o_k^2, 0, 1) over all branches of the iteration at step k
        step k earns d_k - b_k o_k

    This method is ours. A step should not earn the quality of the state in which its branch begins. The other members
    that left this state show that quality. They do not depend on the noise of the step, so subtracting them leaves the
    expected gradient as it is, up to O(1/N) and the fit of b_k; the least-squares slope makes its variance smallest.
    b_k is 0 if the state predicts nothing.

    Args:
        finals: rewards of the finished images.

    Returns:
        Step rewards, NaN where the mean is; slopes, NaN for a step without a branch that has others.
    """
    centre = finals.double().nanmean(1).view(-1, 1, 1)
    d, o = means.double() - centre, others.double() - centre
    both = ~(d.isnan() | o.isnan())
    above, below = (torch.where(both, product, 0.0).sum((0, 1)) for product in (d * o, o.square()))
    slopes = _slopes(above, below, both.any(1).any(0))
    return (d - slopes.nan_to_num() * o.nan_to_num()).float(), slopes


def calibrated(rewards: Float[Tensor, "G N P"]) -> tuple[Float[Tensor, "G N P"], Float[Tensor, " T"]]:
    """Value calibration: a value V_k for each point in place of its reward, and the slopes b_k.

        d_k = r_k - mean over the group's members at point k
        b_k = clip(sum d_k d_S / sum d_k^2, 0, 1) over all members of all groups of the iteration,   b_S = 1
        V_k = b_k d_k

    Ours: the least-squares prediction of the final reward from a point's, both relative to the group's mean. A
    completion is one deterministic guess at the value of a point. With rule-based scores it is a coin flip, and early
    guesses say little; neighbouring gains of raw rewards then mostly cancel. With slopes of 1 the gains differ from the
    plain gains by a constant for each step. A point that predicts nothing has slope 0, and does not judge the step
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
            d = deviations(table[both, k])
            above[k] += (d * deviations(table[both, -1])).sum()
            below[k] += d.square().sum()
            seen[k] |= both.any()
    slopes = _slopes(above, below, seen)
    differences = torch.stack([column_deviations(table) for table in tables])
    return (differences * torch.cat([slopes, slopes.new_ones(1)])).float(), slopes


def _slopes(above: Float[Tensor, " T"], below: Float[Tensor, " T"], seen: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return clip(above / below, 0, 1), NaN for a step that is not seen."""
    slopes = torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0).clamp(0, 1)
    slopes[~seen] = torch.nan
    return slopes
