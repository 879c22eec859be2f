"""From scored groups to the (trajectory, step) pairs that the update runs over.

One `Minibatch` is one shard at one step: the same batch shape in which the rollout actor computed it, so that a
replay with unchanged weights gives the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learner.credit import RULES
from learner.normalise import NORMALISERS
from protocol.config_learning import CreditConfig
from protocol.errors import ContractError
from protocol.messages import Prompt, Rollout, ScoredGroup, Scores


@dataclass(frozen=True)
class CreditedGroup:
    """One prompt's group with its rewards, step rewards and advantages; rows are members."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: Float[Tensor, "N P"]
    valid: Bool[Tensor, "N P"]
    step_rewards: Float[Tensor, "N S"]
    step_valid: Bool[Tensor, "N S"]
    advantages: Float[Tensor, "N S"]

    @property
    def has_contrast(self) -> bool:
        """Whether any advantage differs from 0."""
        return bool(self.advantages.any())


@dataclass(frozen=True)
class Minibatch:
    """One shard at step k."""

    prompt: Prompt
    k: int
    latents: Float[Tensor, "N C H W"]
    next_latents: Float[Tensor, "N C H W"]
    old_log_prob: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]


def credit_group(group: ScoredGroup, config: CreditConfig, *, members: int) -> CreditedGroup:
    """Assemble the shards' rewards and turn them into advantages.

    Raises:
        ContractError: the group does not hold exactly `members` members in order.
    """
    rollouts: tuple[Rollout, ...] = tuple(shard.rollout for shard in group.shards)
    held = [m for r in rollouts for m in range(r.request.first_member, r.request.first_member + r.request.members)]
    if held != list(range(members)):
        raise ContractError(f"a group must hold members 0 to {members - 1} in order, got {held}")
    tables = [_point_rewards(shard.scores, rollout) for shard, rollout in zip(group.shards, rollouts, strict=True)]
    rewards = torch.from_numpy(np.concatenate([values for values, _ in tables]))
    valid = torch.from_numpy(np.concatenate([flags for _, flags in tables]))
    values, step_valid = RULES[config.rule](rewards, valid, steps=len(rollouts[0].steps))
    advantages = NORMALISERS[config.normalise](values, step_valid, epsilon=config.epsilon)
    return CreditedGroup(
        prompt=group.prompt,
        rollouts=rollouts,
        rewards=rewards,
        valid=valid,
        step_rewards=values,
        step_valid=step_valid,
        advantages=advantages.clamp(-config.advantage_clip, config.advantage_clip),
    )


def minibatches(groups: Sequence[CreditedGroup], *, device: torch.device) -> Iterator[Minibatch]:
    """The pairs in a fixed order: group, shard, step; those whose advantages are all 0 drop out."""
    for group in groups:
        for rollout in group.rollouts:
            first = rollout.request.first_member
            rows = slice(first, first + rollout.request.members)
            for column, k in enumerate(rollout.steps):
                advantages = group.advantages[rows, column]
                if not advantages.any():
                    continue
                yield Minibatch(
                    prompt=group.prompt,
                    k=k,
                    latents=torch.from_numpy(rollout.latents[:, k].copy()).to(device),
                    next_latents=torch.from_numpy(rollout.latents[:, k + 1].copy()).to(device),
                    old_log_prob=torch.from_numpy(rollout.log_probs[:, column].copy()).to(device),
                    advantages=advantages.to(device),
                )


def _point_rewards(scores: Scores, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    pictures = int(rollout.image_index.max()) + 1
    if len(scores.reasons) != pictures:
        raise ContractError(f"a shard of {pictures} pictures must have as many scores, got {len(scores.reasons)}")
    return scores.values[rollout.image_index].astype(np.float32), scores.valid[rollout.image_index]
