"""What one iteration's groups show, as numbers by name for `metrics.jsonl`."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from learner.credit.assign import CreditedGroup
from learner.credit.mixture import reward_gains
from protocol.messages import ScoredGroup


def group_metrics(groups: Sequence[ScoredGroup], credited: Sequence[CreditedGroup]) -> dict[str, float]:
    """Rewards of the finished images, missing scores, gains and advantages by step.

    `reward/*` are means over valid finished images; `reward/missing` counts images without a score;
    `group/zero_variance` is the share of groups in which nothing differs, `group/unscored` of those without a step
    reward.
    """
    final = torch.cat([group.rewards[:, -1] for group in credited])
    valid = torch.cat([group.valid[:, -1] for group in credited])
    spreads = [g.rewards[:, -1][g.valid[:, -1]].std(correction=0).item() for g in credited if g.valid[:, -1].any()]
    missing = sum(int((~shard.scores.valid).sum()) for group in groups for shard in group.shards)
    metrics = {
        "reward/mean": final[valid].mean().item() if valid.any() else float("nan"),
        "reward/group_std": float(np.mean(spreads)) if spreads else float("nan"),
        "reward/missing": float(missing),
        "group/zero_variance": float(np.mean([not group.has_contrast for group in credited])),
        "group/unscored": float(np.mean([not group.step_valid.any() for group in credited])),
    }
    return metrics | _component_means(groups) | _by_step(credited) | reward_gains(groups)


def slope_metrics(slopes: Float[Tensor, " T"] | None) -> dict[str, float]:
    """How far the final rewards follow each point's, `credit/step_<k>_slope`; nothing without calibrated values."""
    held = [] if slopes is None else slopes.tolist()
    return {f"credit/step_{k}_slope": slope for k, slope in enumerate(held) if not math.isnan(slope)}


def _component_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    shards = [shard for group in groups for shard in group.shards]
    names = sorted({name for shard in shards for name in shard.scores.components})
    means = {}
    for name in names:
        finals = [
            s.scores.components[name][s.rollout.image_index[:, -1]] for s in shards if name in s.scores.components
        ]
        values = np.concatenate(finals)
        means[f"reward/{name}"] = float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
    return means


def _by_step(credited: Sequence[CreditedGroup]) -> dict[str, float]:
    metrics = {}
    for k in sorted({k for group in credited for rollout in group.rollouts for k in rollout.steps}):
        valid = torch.cat([group.step_valid[:, k] for group in credited])
        if valid.any():
            values = torch.cat([group.step_rewards[:, k] for group in credited])[valid]
            advantages = torch.cat([group.advantages[:, k] for group in credited])[valid]
            metrics[f"gain/step_{k}_abs_mean"] = values.abs().mean().item()
            metrics[f"gain/step_{k}_zero_share"] = (values == 0).float().mean().item()
            metrics[f"advantage/step_{k}_mean"] = advantages.mean().item()
            metrics[f"advantage/step_{k}_std"] = advantages.std(correction=0).item()
    return metrics
