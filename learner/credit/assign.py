"""From the scored groups of one iteration to advantages: rewards [N, P] -> step rewards -> advantages, both [N, T].

Tables of an iteration have a column for each step of the schedule; a step that a shard did not explore is invalid
there. So shards and groups with different windows stand in one table, and a step's statistics never mix with another's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learner.credit.normalise import NORMALISERS, Normaliser, Pool, updated_baseline
from learner.credit.rules import CreditRule, StepRewards, gae, gains, uniform
from learner.credit.turning_point import turning_point
from learner.credit.value_calibration import calibrated
from protocol.config.credit import CreditConfig
from protocol.errors import ContractError
from protocol.messages import COMMON_IMAGE, Prompt, Rollout, ScoredGroup, Scores


@dataclass(frozen=True)
class CreditedGroup:
    """One prompt's group with its rewards, step rewards and advantages; rows are members."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: Float[Tensor, "N P"]
    valid: Bool[Tensor, "N P"]
    step_rewards: Float[Tensor, "N T"]
    step_valid: Bool[Tensor, "N T"]
    advantages: Float[Tensor, "N T"]

    @property
    def has_contrast(self) -> bool:
        """Whether any advantage differs from 0."""
        return bool(self.advantages.any())


@dataclass(frozen=True)
class Assignment:
    """One iteration's groups with their advantages."""

    groups: tuple[CreditedGroup, ...]
    baseline: Float[Tensor, " T"] | None
    """Running mean gain of each step after this iteration; None unless the normalisation keeps one."""
    slopes: Float[Tensor, " T"] | None = None
    """How far the final rewards follow each point's; None unless values are calibrated."""


@dataclass(frozen=True)
class _Shard:
    """The rewards of one shard's points."""

    rollout: Rollout
    rewards: Float[Tensor, "N P"]
    valid: Bool[Tensor, "N P"]


def assign_credit(
    groups: Sequence[ScoredGroup],
    config: CreditConfig,
    *,
    members: int,
    total: int,
    step_weights: Float[Tensor, " T"],
    baseline: Float[Tensor, " T"] | None = None,
) -> Assignment:
    """Advantages of all groups of an iteration.

    Args:
        members: N, the size that every group must have.
        total: T.
        step_weights: one for each step, from `learner.credit.step_weights`.
        baseline: of the iterations before, for `ema`.

    Raises:
        ContractError: a group does not hold exactly `members` members in order.
    """
    shards = [_shards(group, members) for group in groups]
    is_calibrated = config.values == "calibrated" and config.rule in ("gains", "gae")
    values, slopes = _calibrated(shards, total) if is_calibrated else (shards, None)
    tables = _step_rewards(values, config, total)
    if config.step_weights.order == "before":
        tables = [(values * step_weights, valid) for values, valid in tables]
    pool = torch.cat([values for values, _ in tables]), torch.cat([valid for _, valid in tables])
    after = updated_baseline(baseline, *pool, decay=config.ema_decay) if config.normalise == "ema" else None
    normalise = _normaliser(config, pool, _in_use(baseline, after))
    credited = []
    for group, parts, (values, valid) in zip(groups, shards, tables, strict=True):
        advantages = normalise(values, valid).clamp(-config.advantage_clip, config.advantage_clip)
        if config.step_weights.order == "after" and config.step_weights.rule != "none":
            advantages = advantages * step_weights
        credited.append(
            CreditedGroup(
                prompt=group.prompt,
                rollouts=tuple(part.rollout for part in parts),
                rewards=torch.cat([part.rewards for part in parts]),
                valid=torch.cat([part.valid for part in parts]),
                step_rewards=values,
                step_valid=valid,
                advantages=advantages,
            )
        )
    return Assignment(groups=tuple(credited), baseline=after, slopes=slopes)


def _in_use(before: Float[Tensor, " T"] | None, after: Float[Tensor, " T"] | None) -> Float[Tensor, " T"] | None:
    """The baseline of the iterations before; a step that they have not seen takes its own first mean."""
    return after if before is None or after is None else torch.where(before.isnan(), after, before)


def _normaliser(config: CreditConfig, pool: Pool, baseline: Float[Tensor, " T"] | None) -> Normaliser:
    options = {
        "epsilon": config.epsilon,
        "ddof": config.ddof,
        "pool": pool if config.scale == "iteration" else None,
    }
    if config.normalise == "ema":
        options["baseline"] = baseline
    return partial(NORMALISERS[config.normalise], **options)


def _calibrated(shards: Sequence[list[_Shard]], total: int) -> tuple[list[list[_Shard]], Float[Tensor, " T"]]:
    """The shards with the values of their points in place of the rewards; a point without a slope has none."""
    tables, slopes = calibrated([[(s.rewards, s.valid, s.rollout.steps) for s in parts] for parts in shards], total)
    held = [
        [
            replace(part, rewards=table, valid=part.valid & ~table.isnan())
            for part, table in zip(parts, own, strict=True)
        ]
        for parts, own in zip(shards, tables, strict=True)
    ]
    return held, slopes


def _step_rewards(shards: Sequence[list[_Shard]], config: CreditConfig, total: int) -> list[StepRewards]:
    """One table [N, T] for each group."""
    if config.rule == "turning_point":
        flat = [part for parts in shards for part in parts]
        answers = iter(turning_point([(part.rewards, part.valid) for part in flat], config.turning_point))
    else:
        rule = _rule(config)
        answers = (rule(part.rewards, part.valid, steps=len(part.rollout.steps)) for parts in shards for part in parts)
    tables = []
    for parts in shards:
        rows = [_spread(next(answers), part.rollout.steps, total) for part in parts]
        tables.append((torch.cat([values for values, _ in rows]), torch.cat([valid for _, valid in rows])))
    return tables


def _rule(config: CreditConfig) -> CreditRule:
    if config.rule == "gae":
        return partial(gae, decay=config.gae_lambda)
    return {"uniform": uniform, "gains": gains}[config.rule]


def _spread(step_rewards: StepRewards, steps: Sequence[int], total: int) -> StepRewards:
    """Columns of the stochastic steps to columns of the schedule; the others are 0 and invalid."""
    values, valid = step_rewards
    wide, wide_valid = values.new_zeros(len(values), total), valid.new_zeros(len(valid), total)
    wide[:, list(steps)], wide_valid[:, list(steps)] = values, valid
    return wide, wide_valid


def _shards(group: ScoredGroup, members: int) -> list[_Shard]:
    rollouts: tuple[Rollout, ...] = tuple(shard.rollout for shard in group.shards)
    held = [m for r in rollouts for m in range(r.request.first_member, r.request.first_member + r.request.members)]
    if held != list(range(members)):
        raise ContractError(f"a group must hold members 0 to {members - 1} in order, got {held}")
    first = group.shards[0].scores
    return [_point_rewards(shard.scores, rollout, first) for shard, rollout in zip(group.shards, rollouts, strict=True)]


def _point_rewards(scores: Scores, rollout: Rollout, first: Scores) -> _Shard:
    """The rewards of a shard's points; those that refer to the common image have the score of the first shard's."""
    images = int(rollout.image_index.max()) + 1
    if len(scores.reasons) != images:
        raise ContractError(f"a shard of {images} images must have as many scores, got {len(scores.reasons)}")
    is_common = rollout.image_index == COMMON_IMAGE
    values = np.where(is_common, first.values[0], scores.values[rollout.image_index]).astype(np.float32)
    valid = np.where(is_common, first.valid[0], scores.valid[rollout.image_index])
    return _Shard(rollout=rollout, rewards=torch.from_numpy(values), valid=torch.from_numpy(valid))
