"""From the scored groups of one iteration to advantages: rewards [G, N, T+1] -> step rewards -> advantages [G, N, T].

tables = reward_tables(groups, members=24, total=10)
assignment = assign_credit(tables, config.credit, reward_weights={"geneval": 1.0}, step_weights=torch.ones(10))
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from learner.credit.normalisers import NORMALISERS, Normaliser, divided, updated_baseline
from learner.credit.rules import step_rewards
from learner.credit.tables import RewardTables
from protocol.config.credit import CreditConfig
from protocol.errors import ContractError


@dataclass(frozen=True)
class Assignment:
    """The credit of one iteration's trajectories; step rewards, slopes and values as in `Earned`."""

    step_rewards: Float[Tensor, "G N T"]
    advantages: Float[Tensor, "G N T"]
    """0 where the step reward is not known."""
    baseline: Float[Tensor, " T"] | None
    """Running mean gain of each step after this iteration; None unless the normalisation keeps one."""
    slopes: Float[Tensor, " T"] | None
    values: Float[Tensor, "G N P"] | None


def assign_credit(
    tables: RewardTables,
    config: CreditConfig,
    *,
    reward_weights: Mapping[str, float],
    step_weights: Float[Tensor, " T"],
    baseline: Float[Tensor, " T"] | None = None,
) -> Assignment:
    """Assign credit to all groups of an iteration, mixed as `config.mixture` says.

        rewards:    the weighted sum of raw scores is credited and normalised as one reward
        advantages: A = sum_r w_r A_r, A_r the advantages of reward r alone (MixGRPO, arXiv 2507.21802)

    With `advantages` a reward's weight is its share of the update, whatever its scale and spread are. MixGRPO divides
    the weights by their sum; here they are used as given. The sum is clamped, as in MixGRPO and Granular-GRPO. A point
    that one reward could not score is missing for all. Step rewards, values and slopes are the mixture's.

    Args:
        step_weights: from `learner.credit.step_weights`.
        baseline: running mean gain of each step over the earlier iterations, for `ema`.

    Raises:
        ContractError: a reward that `advantages` mixes has no score where the mixture has one.
    """
    credit = _assign(tables, config, baseline)
    if config.mixture == "advantages":
        parts = [
            weight * _assign(_alone(tables, name), config, baseline).advantages
            for name, weight in reward_weights.items()
        ]
        credit = replace(credit, advantages=torch.stack(parts).sum(0))
    advantages = credit.advantages.clamp(-config.advantage_clip, config.advantage_clip)
    if config.step_weights.rule != "none":
        advantages = advantages * step_weights
    return replace(credit, advantages=advantages)


def _assign(
    tables: RewardTables,
    config: CreditConfig,
    baseline: Float[Tensor, " T"] | None,
) -> Assignment:
    """Assign credit by `tables.rewards` and by the rewards of further granularities; without clamp and weights."""
    earned = step_rewards(tables, config)
    rewards = earned.step_rewards
    pool = rewards.flatten(0, 1)
    after = updated_baseline(baseline, pool, decay=config.ema_decay) if config.normalise == "ema" else None
    normalise = _normaliser(config, pool, _in_use(baseline, after))
    advantages = torch.stack([normalise(group) for group in rewards])
    for end in tables.further:
        end_rewards = step_rewards(end, config).step_rewards
        normalise = _normaliser(config, end_rewards.flatten(0, 1), None)
        advantages = advantages + torch.stack([normalise(group) for group in end_rewards])
        rewards = rewards + end_rewards
    rewards = rewards / (1 + len(tables.further))
    return Assignment(
        step_rewards=rewards, advantages=advantages, baseline=after, slopes=earned.slopes, values=earned.values
    )


def _normaliser(config: CreditConfig, pool: Float[Tensor, "M T"], baseline: Float[Tensor, " T"] | None) -> Normaliser:
    if isinstance(config.scale, float):
        return partial(divided, divisor=config.scale)
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
