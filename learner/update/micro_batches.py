"""From groups and their credit to the (trajectory, step) pairs that the update runs over.

A micro-batch is one shard at one step k: the batch shape in which the rollout actor computed it, so that a replay with
an unchanged adapter gives the same bits. A mini-batch is the groups of one optimizer step; its micro-batches'
gradients add up.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flow.maths.noise import SHARED, forward_noise
from flow.pieces import even_pieces
from learner.credit.tables import Strides, no_strides
from protocol.errors import ContractError
from protocol.messages import Credit, Prompt, Rollout, ScoredGroup, ScoredShard, ShardFacts


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The (trajectory, step) pairs of one shard at step k, or a piece of them."""

    prompt: Prompt
    k: int
    latents: Float[Tensor, "N C H W"]
    advantages: Float[Tensor, " N"]
    valid: Bool[Tensor, " N"]
    """Which pairs count; the others have no step reward."""
    rows_per_state: int = 1
    """How many neighbouring rows have the same state, as in `FlowPolicy.rows_per_state`; one velocity serves them."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Pairs):
    """Pairs with the states before and after the step."""

    next_latents: Float[Tensor, "N C H W"]
    old_log_prob: Float[Tensor, " N"]
    old_mean: Float[Tensor, "N C H W"] | None = None
    """Mean of the step under the policy that rolled it out, if the objective compares it."""


@dataclass(frozen=True, kw_only=True)
class NoisedBatch(Pairs):
    """Pairs at the noise level of step k, with the rollout's clean latents; forward objectives train on them."""

    noise: Float[Tensor, "N C H W"]
    """Standard normal, independent of the rollout's noise."""
    weight: Float[Tensor, " N"] | None = None
    """The group's weight, for each member, if the objective weighs groups."""


Batch = TypeVar("Batch", bound=Pairs)
RowsPerState = Callable[[int, Sequence[int], int], int]
"""Returns how many neighbouring rows have the same state, from step k, the shard's stochastic steps and its rows."""


@dataclass(frozen=True)
class StepChoice:
    """Which steps of a shard one epoch trains: a share of them, at least one, chosen anew for each shard and epoch."""

    fraction: float = 1.0
    seed: int = 0
    epoch: int = 0
    """Part of the key of the choice, with seed, iteration, group and first member."""

    def columns(self, facts: ShardFacts) -> list[int]:
        """Choose which of the shard's stochastic steps train, as columns of its `log_probs`, ascending."""
        steps = len(facts.steps)
        count = max(1, math.floor(self.fraction * steps + 1e-9))
        if count == steps:
            return list(range(steps))
        request = facts.request
        key = np.random.SeedSequence([self.seed, request.iteration, request.group, request.first_member, self.epoch])
        order = np.random.Generator(np.random.Philox(key)).permutation(steps)
        return sorted(order[:count].tolist())


@dataclass(frozen=True)
class ShardTask:
    """The training task of one shard of a mini-batch, known from scores alone. `shard_tasks` makes it."""

    number: int
    """Number of the shard in its mini-batch, from 0, in the order of groups and shards."""
    shard: ScoredShard
    advantages: Float[np.ndarray, "N T"]
    valid: Bool[np.ndarray, "N T"]
    """Which pairs have a step reward."""
    columns: Sequence[int]
    """The trained steps, as columns of `Rollout.log_probs`."""
    strides: Mapping[int, int] = field(default_factory=dict)
    """`FlowPolicy.strides`; of the members that share a step only the first trains."""

    @property
    def steps(self) -> list[int]:
        """The trained steps k."""
        return [self.shard.facts.steps[column] for column in self.columns]

    @property
    def pairs(self) -> int:
        """Number of trained pairs that have a step reward, also of pairs that `micro_batches` drops."""
        return int(self.valid[:, self.steps].sum())

    @property
    def all_pairs(self) -> int:
        """Number of trained pairs, as if no score were missing."""
        return sum(len(range(0, len(self.valid), self.strides.get(k, 1))) for k in self.steps)

    def teaching(self, *, keeps_idle: bool) -> list[int]:
        """Return the columns that are worth training: not all advantages are 0.

        Args:
            keeps_idle: also return columns with a step reward, for a KL term that applies there too.
        """
        return [
            column
            for column, k in zip(self.columns, self.steps, strict=True)
            if self.advantages[:, k].any() or (keeps_idle and self.valid[:, k].any())
        ]


def shard_tasks(
    groups: Sequence[ScoredGroup],
    group_credits: Sequence[Credit],
    *,
    choice: StepChoice,
    first: int = 0,
    strides: Strides = no_strides,
) -> list[ShardTask]:
    """Make the tasks of the shards of a mini-batch's groups in their fixed order: group, then shard.

    Args:
        strides: `FlowPolicy.strides` of the policy that rolled out.
    """
    tasks: list[ShardTask] = []
    for group, credit in zip(groups, group_credits, strict=True):
        for shard in group.shards:
            request = shard.facts.request
            rows = slice(request.first_member, request.first_member + request.members)
            task = ShardTask(
                number=first + len(tasks),
                shard=shard,
                advantages=credit.advantages[rows],
                valid=~np.isnan(credit.step_rewards[rows]),
                columns=choice.columns(shard.facts),
                strides=strides(shard.facts.steps),
            )
            tasks.append(task)
    return tasks


def micro_batches(
    task: ShardTask, rollout: Rollout, *, rows_per_state: RowsPerState, device: torch.device, keeps_idle: bool = False
) -> Iterator[MicroBatch]:
    """Yield the pairs of one shard, step by step; steps whose advantages are all 0 are left out.

    Args:
        rows_per_state: `FlowPolicy.rows_per_state` of the policy that rolled out.
        keeps_idle: as in `ShardTask.teaching`.

    Raises:
        ContractError: the trajectories belong to another shard, or rows differ that must have the same state.
    """
    _require_own(task, rollout)
    if rollout.log_probs is None:
        raise ContractError("an objective of the reverse process needs the rollout's log-probs, got none")
    for column in task.teaching(keeps_idle=keeps_idle):
        k = rollout.steps[column]
        rows = slice(None, None, task.strides.get(k, 1))  # each branch's first member
        latents = rollout.latents[rows, k]
        same = rows_per_state(k, rollout.steps, len(latents))
        require_same_rows(latents, same, k=k)
        yield MicroBatch(
            prompt=rollout.request.prompt,
            k=k,
            latents=_tensor(latents, device),
            next_latents=_tensor(rollout.latents[rows, k + 1], device),
            old_log_prob=_tensor(rollout.log_probs[rows, column], device),
            advantages=_tensor(task.advantages[rows, k], device),
            valid=_tensor(task.valid[rows, k], device),
            old_mean=None if rollout.means is None else _tensor(rollout.means[rows, column], device),
            rows_per_state=same,
        )


def noised_batches(
    task: ShardTask, rollout: Rollout, *, device: torch.device, choice: StepChoice, shares_noise: bool = False
) -> Iterator[NoisedBatch]:
    """Yield the pairs of one shard for a forward objective, step by step; pairs whose advantage is 0 train too.

    Args:
        choice: its seed and epoch key the noise.
        shares_noise: whether all members of the group get the same noise.

    Raises:
        ContractError: the trajectories belong to another shard.
    """
    _require_own(task, rollout)
    request = rollout.request
    members = range(request.first_member, request.first_member + request.members)
    for column in task.teaching(keeps_idle=True):
        k = rollout.steps[column]
        noise = forward_noise(
            seed=choice.seed,
            iteration=request.iteration,
            group=request.group,
            members=[SHARED] if shares_noise else members,
            step=k,
            epoch=choice.epoch,
            shape=rollout.latents.shape[2:],
        )
        yield NoisedBatch(
            prompt=request.prompt,
            k=k,
            latents=_tensor(rollout.latents[:, -1], device),
            noise=_tensor(noise.numpy(), device).expand(len(members), -1, -1, -1),
            advantages=_tensor(task.advantages[:, k], device),
            valid=_tensor(task.valid[:, k], device),
        )


def split_micro_batches(micro_batches: Iterable[Batch], *, most: int | None) -> Iterator[Batch]:
    """Cut every micro-batch into even pieces of at most `most` different states; None leaves them whole.

    `FlowPolicy.velocity` cuts its forwards at the same positions, so that a piece is a batch that the rollout computed,
    unless `learner.batch` is another number.
    """
    for micro_batch in micro_batches:
        count, rows_per_state = len(micro_batch.latents), micro_batch.rows_per_state
        pieces = even_pieces(-(-count // rows_per_state), most)
        if len(pieces) == 1:
            yield micro_batch
            continue
        for piece in pieces:
            rows = {
                each.name: value[piece.start * rows_per_state : piece.stop * rows_per_state]
                for each in fields(micro_batch)
                if isinstance(value := getattr(micro_batch, each.name), torch.Tensor) and len(value) == count
            }
            yield replace(micro_batch, **rows)


def require_same_rows(latents: Float[np.ndarray, "N C H W"], rows_per_state: int, *, k: int) -> None:
    """Require each `rows_per_state` neighbouring rows to be the same state, since they share one velocity.

    Args:
        latents: the states x_k of a shard's rows [N, C, H, W].
        rows_per_state: from `FlowPolicy.rows_per_state`.

    Raises:
        ContractError: they differ.
    """
    for first in range(0, len(latents), rows_per_state) if rows_per_state > 1 else ():
        rows = latents[first : first + rows_per_state]
        if not np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape), equal_nan=True):
            raise ContractError(
                f"trajectories that split in step {k} must have the same state before it, got different ones: rollout"
                " actor and learner must have the same code and config"
            )


def _require_own(task: ShardTask, rollout: Rollout) -> None:
    if (rollout.request, rollout.steps) != (task.shard.facts.request, task.shard.facts.steps):
        raise ContractError(f"a shard must come with its own trajectories, got trajectories of {rollout.request}")


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device. With pinned memory the CPU does not wait for the GPU and prepares the next batch."""
    held = torch.from_numpy(array.copy())
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)
