"""From the scored groups of one iteration to advantages: rewards [G, N, T+1] -> step rewards -> advantages [G, N, T].

A table has a row for each trajectory and a column for each point or step of the schedule; NaN stands for what is
missing. So groups and shards with different windows share one table, and no statistic mixes different steps.

tables = reward_tables(groups, members=24, total=10)
assignment = assign_credit(tables, config.credit, reward_weights={"geneval": 1.0}, step_weights=torch.ones(10))
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from learner.credit.restraint import doubtful, scaled_by_distance
from learner.credit.rules import (
    NORMALISERS,
    CreditRule,
    Normaliser,
    along_windows,
    calibrated,
    gae,
    gains,
    judged,
    lineage,
    tree,
    uniform,
    updated_baseline,
)
from learner.credit.turning_point import turning_point
from protocol.config.credit import CreditConfig
from protocol.config.learning import KlConfig
from protocol.errors import ContractError
from protocol.messages import NO_IMAGE, ScoredGroup, Scores, ShardFacts

Strides = Callable[[Sequence[int]], Mapping[int, int]]
"""From a shard's stochastic steps to how many neighbouring members share each of them, by step; 1 for the others."""


def no_strides(explored: Sequence[int]) -> Mapping[int, int]:  # noqa: ARG001
    """Return what members that share no step have: nothing."""
    return {}


@dataclass(frozen=True)
class RewardTables:
    """The scores of an iteration's images by trajectory and point. Only `reward_tables` makes it.

    Column k is the point before step k, the last column the finished image. NaN: the image has no score, or there is
    no image, since the trajectory did not explore that step or only finished images are scored.
    """

    rewards: Float[Tensor, "G N P"]
    """The mixture that trains."""
    scores: Mapping[str, Float[Tensor, "G N P"]]
    """Each scorer's numbers by its name, and its further readings by `<scorer>/<component>`."""
    explored: Bool[Tensor, "G N T"]
    """Which steps each trajectory took stochastically."""
    branches: Int[Tensor, "G N T"]
    """Each member's branch at each step: the members with the same number share the step's state and noise. It is the
    index of the first of them."""
    parents: Int[Tensor, "G N T"]
    """Likewise the branch that it separated from last: the members with the same number were in one state then."""
    skipped: Bool[Tensor, "G N T"] | None = None
    """Which points before these steps are not completed, by `completion.every`; None for none."""
    further: tuple["RewardTables", ...] = ()
    """The same for the ends of each further granularity: a member that lacks the score of one of its ends has none."""


@dataclass(frozen=True)
class Assignment:
    """The credit of one iteration's trajectories."""

    step_rewards: Float[Tensor, "G N T"]
    """NaN where it is not known."""
    advantages: Float[Tensor, "G N T"]
    """0 where the step reward is not known."""
    baseline: Float[Tensor, " T"] | None
    """Running mean gain of each step after this iteration; None unless the normalisation keeps one."""
    slopes: Float[Tensor, " T"] | None
    """Slope of the final rewards on each point's rewards; None unless values are calibrated."""
    values: Float[Tensor, "G N P"] | None
    """Calibrated value of each point, NaN where its reward is; None unless values are calibrated."""
    doubtful: Bool[Tensor, "G N"] | None = None
    """The members that have the KL penalty; None for all."""


def reward_tables(
    groups: Sequence[ScoredGroup], *, members: int, total: int, strides: Strides = no_strides
) -> RewardTables:
    """Look up every point's scores; credit resolves `ShardFacts.image_index`, `COMMON_IMAGE` and `NO_IMAGE` only here.

    Args:
        groups: G complete groups of one iteration.
        members: N, the size that every group must have.
        total: T, steps of the schedule.
        strides: `FlowPolicy.strides` of the policy that rolled out.

    Returns:
        float32 tables [G, N, T+1].

    Raises:
        ContractError: a group does not hold exactly `members` members in order, or a shard does not hold one score,
            finite where valid, for each image.
    """
    shape = len(groups), members, total + 1
    names = sorted({name for group in groups for shard in group.shards for name in shard.scores.components})
    ends = max((1 + _further(shard.facts).shape[1] for group in groups for shard in group.shards), default=1)
    readings = [[torch.full(shape, torch.nan) for _ in range(1 + len(names))] for _ in range(ends)]
    explored, skipped = torch.zeros(2, len(groups), members, total, dtype=torch.bool)
    branches, parents = torch.arange(members).view(1, -1, 1).repeat(2, len(groups), 1, total)
    for row, group in enumerate(groups):
        _require_members(group, members)
        for shard in group.shards:
            facts = shard.facts
            indices = [facts.image_index, *(column[:, None] for column in _further(facts).T)]
            _require_scores(shard.scores, images=int(max(index.max() for index in indices)) + 1)
            first = facts.request.first_member
            rows = slice(first, first + facts.request.members)
            explored[row][rows, list(facts.steps)] = True
            own, above = lineage(strides(facts.steps), members=facts.request.members, total=total)
            branches[row][rows], parents[row][rows] = first + own, first + above
            if (facts.image_index == NO_IMAGE).any():
                skipped[row][rows, list(facts.steps)] = torch.from_numpy(facts.image_index[:, :-1] == NO_IMAGE)
            columns = (_readings(each, names) for each in (shard.scores, group.shards[0].scores))
            for reading, (own, common) in enumerate(zip(*columns, strict=True)):
                for end, index in enumerate(indices):
                    points = [*facts.steps, total][-index.shape[1] :]
                    # NO_IMAGE is -2 and COMMON_IMAGE -1: they index the two scores appended to the shard's own.
                    found = np.append(own, [np.nan, common[0]])[index]
                    readings[end][reading][row][rows, points] = torch.from_numpy(found.astype(np.float32))
    lacking = torch.stack([rewards[..., -1] for rewards, *_ in readings]).isnan().any(0)
    tables: list[RewardTables] = []
    for rewards, *scores in readings:
        rewards[..., -1][lacking] = torch.nan
        tables.append(
            RewardTables(
                rewards=rewards,
                scores=dict(zip(names, scores, strict=True)),
                explored=explored,
                skipped=skipped if skipped.any() else None,
                branches=branches,
                parents=parents,
            )
        )
    return replace(tables[0], further=tuple(tables[1:]))


def assign_credit(
    tables: RewardTables,
    config: CreditConfig,
    *,
    reward_weights: Mapping[str, float],
    step_weights: Float[Tensor, " T"],
    baseline: Float[Tensor, " T"] | None = None,
    kl: KlConfig | None = None,
) -> Assignment:
    """Assign credit to all groups of an iteration, mixed as `config.mixture` says.

        rewards:    the weighted sum of raw scores is credited and normalised as one reward
        advantages: A = sum_r w_r A_r, A_r the advantages of reward r alone, clamped (MixGRPO, arXiv 2507.21802)

    With `advantages` a reward's weight is its share of the update, whatever its scale and spread are. MixGRPO divides
    the weights by their sum and clamps the mixture instead; here weights are used as given. A point that one reward
    could not score is missing for all. Step rewards, values and slopes are the mixture's.

    Args:
        tables: rewards of the iteration.
        config: credit rule, normalisation and mixture.
        reward_weights: weight of each reward that trains.
        step_weights: one factor for each step, from `learner.credit.step_weights`.
        baseline: running mean gain of each step over the earlier iterations, for `ema`.
        kl: decides which members have the KL penalty.

    Returns:
        Step rewards and advantages [G, N, T].

    Raises:
        ContractError: a reward that `advantages` mixes has no score where the mixture has one, or the reward of
            `config.diversity` is no distance.
    """
    credit = _assign(tables, config, step_weights, baseline)
    if config.mixture == "advantages":
        parts = [
            weight * _assign(_alone(tables, name), config, step_weights, baseline).advantages
            for name, weight in reward_weights.items()
        ]
        credit = replace(credit, advantages=torch.stack(parts).sum(0))
    if config.diversity:
        distances = _finals(tables, config.diversity)
        scaled = [scaled_by_distance(*group) for group in zip(credit.advantages, distances, strict=True)]
        credit = replace(credit, advantages=torch.stack(scaled))
    if kl and kl.weight and kl.auxiliary:
        others = torch.stack([_finals(tables, name) for name in kl.auxiliary], dim=1)
        chosen = [
            doubtful(reward, other, share=kl.share)
            for reward, other in zip(tables.rewards[..., -1], others, strict=True)
        ]
        credit = replace(credit, doubtful=torch.stack(chosen))
    return credit


def _assign(
    tables: RewardTables,
    config: CreditConfig,
    step_weights: Float[Tensor, " T"],
    baseline: Float[Tensor, " T"] | None,
) -> Assignment:
    """Assign credit by `tables.rewards` and by the rewards of further granularities."""
    weights = config.step_weights
    before = step_weights if weights.order == "before" else torch.ones_like(step_weights)
    step_rewards, slopes, values = _step_rewards(tables, config)
    step_rewards = step_rewards * before
    pool = step_rewards.flatten(0, 1)
    after = updated_baseline(baseline, pool, decay=config.ema_decay) if config.normalise == "ema" else None
    normalise = _normaliser(config, pool, _in_use(baseline, after))
    advantages = torch.stack([normalise(group) for group in step_rewards])
    for end in tables.further:
        own = _step_rewards(end, config)[0] * before
        normalise = _normaliser(config, own.flatten(0, 1), None)
        advantages = advantages + torch.stack([normalise(group) for group in own])
        step_rewards = step_rewards + own
    step_rewards = step_rewards / (1 + len(tables.further))
    advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    if weights.order == "after" and weights.rule != "none":
        advantages = advantages * step_weights
    return Assignment(step_rewards=step_rewards, advantages=advantages, baseline=after, slopes=slopes, values=values)


def _step_rewards(
    tables: RewardTables, config: CreditConfig
) -> tuple[Float[Tensor, "G N T"], Float[Tensor, " T"] | None, Float[Tensor, "G N P"] | None]:
    """Compute step rewards by the credit rule, and slopes and values if values are calibrated."""
    rewards, slopes, values = tables.rewards, None, None
    if config.rule == "turning_point":
        choice = config.turning_point
        step_rewards = turning_point(
            rewards,
            tables.explored,
            is_consistent=choice.is_consistent,
            has_first_step=choice.has_first_step,
            is_balanced=choice.is_balanced,
        )
        return step_rewards, None, None
    if config.rule == "tree":
        finals, is_calibrated = rewards[..., -1], config.values == "calibrated"
        means, others = tree(finals, tables.explored, branches=tables.branches, parents=tables.parents)
        if not is_calibrated:
            return means, None, None
        step_rewards, slopes = judged(means, others, finals)
        return step_rewards, slopes, None
    if config.values == "calibrated" and config.rule != "uniform":
        values, slopes = calibrated(rewards)
        rewards = values
    rules: dict[str, CreditRule] = {"uniform": uniform, "gains": gains, "gae": partial(gae, decay=config.gae_lambda)}
    return along_windows(rules[config.rule], rewards, tables.explored, tables.skipped), slopes, values


def _normaliser(config: CreditConfig, pool: Float[Tensor, "M T"], baseline: Float[Tensor, " T"] | None) -> Normaliser:
    normalise = partial(
        NORMALISERS[config.normalise],
        epsilon=config.epsilon,
        ddof=config.ddof,
        pool=pool if config.scale == "iteration" else None,
    )
    return partial(normalise, baseline=baseline) if config.normalise == "ema" else normalise


def _in_use(before: Float[Tensor, " T"] | None, after: Float[Tensor, " T"] | None) -> Float[Tensor, " T"] | None:
    """Return the baseline of the earlier iterations; a step that they have not seen takes its own first mean."""
    return after if before is None or after is None else torch.where(before.isnan(), after, before)


def _alone(tables: RewardTables, name: str) -> RewardTables:
    """Return the same tables as if `name` were the only reward."""
    rewards = tables.scores.get(name, torch.full_like(tables.rewards, torch.nan))
    is_missing = tables.rewards.isnan()
    if (rewards.isnan() & ~is_missing).any():
        raise ContractError(f"credit.mixture advantages needs a score of every reward, got none of {name!r}")
    further = tuple(_alone(end, name) for end in tables.further)
    return replace(tables, rewards=torch.where(is_missing, torch.nan, rewards), further=further)


def _finals(tables: RewardTables, name: str) -> Float[Tensor, "G N"]:
    """Return one reward's scores of the finished images, NaN where it has none."""
    scores = tables.scores.get(name)
    return torch.full_like(tables.rewards[..., -1], torch.nan) if scores is None else scores[..., -1]


def _readings(scores: Scores, names: Sequence[str]) -> Iterator[Float[np.ndarray, " I"]]:
    """Yield the mixture, then the named readings of a shard's images; NaN where missing."""
    nothing = np.full(len(scores.reasons), np.nan, np.float32)
    yield np.where(scores.valid, scores.values, nothing)
    for name in names:
        yield scores.components.get(name, nothing)


def _further(facts: ShardFacts) -> Int[np.ndarray, "N E"]:
    return np.zeros((len(facts.image_index), 0), np.int64) if facts.further_index is None else facts.further_index


def _require_members(group: ScoredGroup, members: int) -> None:
    requests = [shard.facts.request for shard in group.shards]
    held = [member for each in requests for member in range(each.first_member, each.first_member + each.members)]
    if held != list(range(members)):
        raise ContractError(f"a group must hold members 0 to {members - 1} in order, got {held}")


def _require_scores(scores: Scores, *, images: int) -> None:
    if len(scores.reasons) != images:
        raise ContractError(f"a shard of {images} images must have as many scores, got {len(scores.reasons)}")
    if not np.isfinite(scores.values[scores.valid]).all():
        raise ContractError("a valid score must be finite, got NaN or infinity: the scorer must give it a reason")
