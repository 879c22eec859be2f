"""TP-GRPO's credit (arXiv 2602.06422): a step that turns a trajectory round earns all that is gained from it on.

With rewards R_0 ... R_S at the points, gains d_k = R_k - R_{k-1} (k = 1 ... S), D = R_S - R_0 and
s_k = sign(d_k) sign(D), where sign(0) = 0:

    turning point   k >= 2, s_{k-1} < 0 and s_k > 0                          Definition 4.1
    consistent      also sign(d_k) sign(R_S - R_k) > 0                       Definition 5.1: |r_agg| > |d_k|
    first step      s_1 > 0; consistent: sign(d_1) sign(R_S - R_1) > 0       Remark 5.2
    aggregate       r_agg,k = R_S - R_{k-1}, in the place of d_k

Columns count from 0: column k - 1 is the step from point k - 1 to point k. The last step is never consistent, since
nothing follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learner.credit.rules import StepRewards, gains
from protocol.config.credit import TurningPointConfig


@dataclass(frozen=True)
class Turns:
    """What one group's trajectories show."""

    gains: Float[Tensor, "N S"]
    valid: Bool[Tensor, "N S"]
    aggregates: Float[Tensor, "N S"]
    selected: Bool[Tensor, "N S"]

    def step_rewards(self, kept: Bool[Tensor, "N S"]) -> StepRewards:
        """The aggregate where `kept`, the gain elsewhere."""
        return torch.where(kept, self.aggregates, self.gains), self.valid


def turning_point(
    groups: Sequence[tuple[Float[Tensor, "N P"], Bool[Tensor, "N P"]]], config: TurningPointConfig
) -> list[StepRewards]:
    """Step rewards of all groups of an iteration, given each group's rewards and their validity."""
    turns = [
        find_turns(rewards, valid, is_consistent=config.is_consistent, has_first_step=config.has_first_step)
        for rewards, valid in groups
    ]
    kept = balanced(turns) if config.is_balanced else [each.selected for each in turns]
    return [each.step_rewards(selection) for each, selection in zip(turns, kept, strict=True)]


def find_turns(
    rewards: Float[Tensor, "N P"], valid: Bool[Tensor, "N P"], *, is_consistent: bool, has_first_step: bool
) -> Turns:
    """Gains, aggregates and selected steps. A missing reward takes part in no sign, so it selects nothing."""
    steps = rewards.shape[1] - 1
    values, values_valid = gains(rewards, valid, steps=steps)
    known = torch.where(valid, rewards, torch.nan)
    trend = known[:, -1:] - known[:, :1]
    agrees = _sign(values) * _sign(trend)
    selected = torch.zeros_like(valid[:, 1:])
    selected[:, 1:] = (agrees[:, :-1] < 0) & (agrees[:, 1:] > 0)
    if has_first_step:
        selected[:, 0] = agrees[:, 0] > 0
    if is_consistent:
        selected &= _sign(values) * _sign(known[:, -1:] - known[:, 1:]) > 0
    return Turns(gains=values, valid=values_valid, aggregates=known[:, -1:] - known[:, :-1], selected=selected)


def balanced(turns: Sequence[Turns]) -> list[Bool[Tensor, "N S"]]:
    """As many positive as negative aggregates over all groups: the largest of each sign, the others revert to gains.

    Where one sign is absent all stay. Ranked by |r_agg|, ties by (group, member, step); the published code ranks by
    |R_S - R_0| and balances each device's part, which would depend on the number of devices.
    """
    chosen = [
        (float(turn.aggregates[member, step]), group, member, step)
        for group, turn in enumerate(turns)
        for member, step in turn.selected.nonzero().tolist()
    ]
    positive = [each for each in chosen if each[0] > 0]
    negative = [each for each in chosen if each[0] < 0]
    if not positive or not negative:
        return [turn.selected for turn in turns]
    count = min(len(positive), len(negative))
    kept = [torch.zeros_like(turn.selected) for turn in turns]
    for side in (positive, negative):
        for _, group, member, step in sorted(side, key=lambda each: (-abs(each[0]), *each[1:]))[:count]:
            kept[group][member, step] = True
    return kept


def _sign(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Sign with 0 for what is missing."""
    return torch.nan_to_num(values, nan=0.0).sign()
