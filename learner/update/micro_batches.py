"""From credited groups to the (trajectory, step) pairs that the update runs over.

One `MicroBatch` is one shard at one step: the same batch shape in which the rollout actor computed it, so that a
replay with unchanged adapter gives the same bits.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learner.credit.assign import CreditedGroup
from protocol.messages import Prompt, Rollout


@dataclass(frozen=True)
class MicroBatch:
    """One shard at step k."""

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


def micro_batches(
    groups: Sequence[CreditedGroup],
    *,
    device: torch.device,
    step_fraction: float = 1.0,
    seed: int = 0,
    epoch: int = 0,
    keeps_idle: bool = False,
) -> Iterator[MicroBatch]:
    """The pairs in a fixed order: group, shard, step; those whose advantages are all 0 drop out.

    Args:
        step_fraction: share of a shard's steps that is trained, at least one, drawn for each shard and epoch.
        seed, epoch: with the shard's place in the run the key of that draw.
        keeps_idle: keep shards whose advantages are all 0, for a KL term that holds there too.
    """
    for group in groups:
        for rollout in group.rollouts:
            first = rollout.request.first_member
            rows = slice(first, first + rollout.request.members)
            trained = _trained_columns(rollout, step_fraction, seed=seed, epoch=epoch)
            for column, k in enumerate(rollout.steps):
                advantages = group.advantages[rows, k]
                is_idle = not advantages.any()
                if column not in trained or (is_idle and not (keeps_idle and group.step_valid[rows, k].any())):
                    continue
                yield MicroBatch(
                    prompt=group.prompt,
                    k=k,
                    latents=_tensor(rollout.latents[:, k], device),
                    next_latents=_tensor(rollout.latents[:, k + 1], device),
                    old_log_prob=_tensor(rollout.log_probs[:, column], device),
                    advantages=advantages.to(device),
                    valid=group.step_valid[rows, k].to(device),
                    old_mean=None if rollout.means is None else _tensor(rollout.means[:, column], device),
                    target=None if rollout.targets is None else _tensor(rollout.targets[:, column], device),
                )


def count_pairs(groups: Sequence[CreditedGroup], *, step_fraction: float, seed: int, epoch: int) -> int:
    """Pairs with a valid step reward among the trained ones: what the loss is averaged over."""
    pairs = 0
    for group in groups:
        for rollout in group.rollouts:
            first = rollout.request.first_member
            rows = slice(first, first + rollout.request.members)
            trained = _trained_columns(rollout, step_fraction, seed=seed, epoch=epoch)
            columns = [k for column, k in enumerate(rollout.steps) if column in trained]
            pairs += int(group.step_valid[rows, columns].sum())
    return pairs


def _trained_columns(rollout: Rollout, fraction: float, *, seed: int, epoch: int) -> frozenset[int]:
    steps = len(rollout.steps)
    count = max(1, math.floor(fraction * steps))
    if count == steps:
        return frozenset(range(steps))
    request = rollout.request
    key = np.random.SeedSequence([seed, request.iteration, request.group, request.first_member, epoch])
    order = np.random.Generator(np.random.Philox(key)).permutation(steps)
    return frozenset(order[:count].tolist())


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)


def split_micro_batches(micro_batches: Iterable[MicroBatch], *, most: int | None) -> Iterator[MicroBatch]:
    """Every micro-batch in pieces of at most `most` samples; None leaves them whole.

    `FlowPolicy.velocity` cuts its forwards at the same places, so that a piece is a batch that the rollout computed.
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
