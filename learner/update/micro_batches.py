"""From an iteration's groups and their credit to the (trajectory, step) pairs that the update runs over.

A micro-batch is one shard at one step k: the batch shape in which the rollout actor computed it, so that a replay with
an unchanged adapter gives the same bits. A mini-batch is the groups of one optimizer step; its micro-batches'
gradients add up.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from protocol.messages import Credit, Prompt, Rollout, ScoredGroup


@dataclass(frozen=True)
class MicroBatch:
    """One shard at step k, or a piece of it."""

    prompt: Prompt
    k: int
    latents: Float[Tensor, "N C H W"]
    next_latents: Float[Tensor, "N C H W"]
    old_log_prob: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    valid: Bool[Tensor, " N"]
    """Which pairs count; the others have no step reward."""
    old_mean: Float[Tensor, "N C H W"] | None = None
    """Mean of the step under the policy that drew it, where the objective compares it."""
    target: Float[Tensor, "N C H W"] | None = None
    """Clean latents that the step led to, where the objective regresses on them."""


@dataclass(frozen=True)
class StepChoice:
    """Which steps of a shard one epoch trains: a share of them, at least one, drawn for each shard and epoch."""

    fraction: float = 1.0
    seed: int = 0
    epoch: int = 0
    """With seed, iteration, group and first member the key of the draw."""

    def columns(self, rollout: Rollout) -> list[int]:
        """The trained ones of the rollout's stochastic steps, ascending, as columns of its `log_probs`."""
        steps = len(rollout.steps)
        count = max(1, math.floor(self.fraction * steps))
        if count == steps:
            return list(range(steps))
        request = rollout.request
        key = np.random.SeedSequence([self.seed, request.iteration, request.group, request.first_member, self.epoch])
        order = np.random.Generator(np.random.Philox(key)).permutation(steps)
        return sorted(order[:count].tolist())


def micro_batches(
    groups: Sequence[ScoredGroup],
    group_credits: Sequence[Credit],
    *,
    choice: StepChoice,
    device: torch.device,
    keeps_idle: bool = False,
) -> Iterator[MicroBatch]:
    """The pairs of a mini-batch in a fixed order: group, shard, step; those whose advantages are all 0 drop out.

    Args:
        groups: of the mini-batch.
        group_credits: one for each group.
        choice: which steps are trained.
        device: where the tensors go.
        keeps_idle: keep shards whose advantages are all 0, for a KL term that holds there too.

    Returns:
        One micro-batch for each shard and trained step.
    """
    for rollout, advantages, valid in _shards(groups, group_credits):
        for column in choice.columns(rollout):
            k = rollout.steps[column]
            if not (advantages[:, k].any() or (keeps_idle and valid[:, k].any())):
                continue
            yield MicroBatch(
                prompt=rollout.request.prompt,
                k=k,
                latents=_tensor(rollout.latents[:, k], device),
                next_latents=_tensor(rollout.latents[:, k + 1], device),
                old_log_prob=_tensor(rollout.log_probs[:, column], device),
                advantages=_tensor(advantages[:, k], device),
                valid=_tensor(valid[:, k], device),
                old_mean=None if rollout.means is None else _tensor(rollout.means[:, column], device),
                target=None if rollout.targets is None else _tensor(rollout.targets[:, column], device),
            )


def count_pairs(groups: Sequence[ScoredGroup], group_credits: Sequence[Credit], *, choice: StepChoice) -> int:
    """Pairs of a mini-batch that have a step reward and are trained: what the loss is averaged over.

    Args:
        groups: of the mini-batch.
        group_credits: one for each group.
        choice: which steps are trained.

    Returns:
        Their number; those that `micro_batches` drops count too.
    """
    return sum(
        int(valid[:, rollout.steps[column]].sum())
        for rollout, _, valid in _shards(groups, group_credits)
        for column in choice.columns(rollout)
    )


def split_micro_batches(micro_batches: Iterable[MicroBatch], *, most: int | None) -> Iterator[MicroBatch]:
    """Cut every micro-batch into pieces of at most `most` trajectories; None leaves them whole.

    `FlowPolicy.velocity` cuts its forwards at the same positions, so that a piece is a batch that the rollout computed.
    """
    for micro_batch in micro_batches:
        count = len(micro_batch.latents)
        size = most or count
        if count <= size:
            yield micro_batch
            continue
        for start in range(0, count, size):
            pieces = {
                field.name: value[start : start + size]
                for field in fields(micro_batch)
                if isinstance(value := getattr(micro_batch, field.name), torch.Tensor) and len(value) == count
            }
            yield replace(micro_batch, **pieces)


def _shards(
    groups: Sequence[ScoredGroup], group_credits: Sequence[Credit]
) -> Iterator[tuple[Rollout, Float[np.ndarray, "N T"], Bool[np.ndarray, "N T"]]]:
    """Every shard's rollout with its members' advantages, and which of their steps have a step reward."""
    for group, credit in zip(groups, group_credits, strict=True):
        for shard in group.shards:
            request = shard.rollout.request
            rows = slice(request.first_member, request.first_member + request.members)
            yield shard.rollout, credit.advantages[rows], ~np.isnan(credit.step_rewards[rows])


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)
