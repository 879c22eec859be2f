"""The scores of one iteration as dense tables: a row for each trajectory, a column for each point or step.

NaN stands for what is missing. So groups and shards with different windows share one table, and no statistic mixes
different steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protocol.errors import ContractError
from protocol.messages import NO_IMAGE, ScoredGroup, Scores, ShardFacts

Strides = Callable[[Sequence[int]], Mapping[int, int]]
"""Maps a shard's stochastic steps to the number of consecutive members that share each; absent means 1."""


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
            branch, parent = lineage(strides(facts.steps), members=facts.request.members, total=total)
            branches[row][rows], parents[row][rows] = first + branch, first + parent
            if (facts.image_index == NO_IMAGE).any():
                skipped[row][rows, list(facts.steps)] = torch.from_numpy(facts.image_index[:, :-1] == NO_IMAGE)
            columns = (_readings(each, names) for each in (shard.scores, group.shards[0].scores))
            for reading, (shard_scores, common) in enumerate(zip(*columns, strict=True)):
                for end, index in enumerate(indices):
                    points = [*facts.steps, total][-index.shape[1] :]
                    # NO_IMAGE is -2 and COMMON_IMAGE -1: they index the two scores appended to the shard's own.
                    at_points = np.append(shard_scores, [np.nan, common[0]])[index]
                    readings[end][reading][row][rows, points] = torch.from_numpy(at_points.astype(np.float32))
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


def lineage(strides: Mapping[int, int], *, members: int, total: int) -> tuple[Int[Tensor, "N T"], Int[Tensor, "N T"]]:
    """Return each member's branch and parent at each step, in a shard whose branches split into two.

    All members are in one state at first, so the parent of the widest branches is the whole shard.

    Args:
        strides: `FlowPolicy.strides`.

    Returns:
        The index of the first member of each branch, and of each parent. The last branch may have fewer members.
    """
    widest = max(strides.values(), default=1)
    widths = [strides.get(k, 1) for k in range(total)]
    member = torch.arange(members).unsqueeze(1)
    branch, parent = (
        torch.tensor(each) for each in (widths, [members if width == widest else 2 * width for width in widths])
    )
    # Rounded down to a multiple of the width: the first member of the branch.
    return member // branch * branch, member // parent * parent


CreditRule = Callable[[Float[Tensor, "M P"]], Float[Tensor, "M S"]]
"""Turns the rewards of M trajectories at P = S + 1 points, the finished image's last, into their step rewards."""


def along_windows(
    rule: CreditRule,
    rewards: Float[Tensor, "G N P"],
    explored: Bool[Tensor, "G N T"],
    skipped: Bool[Tensor, "G N T"] | None = None,
) -> Float[Tensor, "G N T"]:
    """Apply a rule to each trajectory's explored points: before its stochastic steps, and the finished image.

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
        rows, (window, before) = (ways == way).all(-1), way.chunk(2)
        points = torch.cat([before, before.new_ones(1)])
        # A step belongs to the last scored point before it; the m steps of a point earn 1/m of its step reward.
        part = before[window].cumsum(0) - 1
        shares = rule(rewards[rows][:, points]) / part.bincount(minlength=int(before.sum()))
        values[rows.unsqueeze(-1) & window] = shares[:, part].flatten()
    return values


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
