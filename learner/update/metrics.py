"""The numbers of one iteration by name, for `metrics.jsonl`: rewards, credit, and the course of the update."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from learner.credit.assign import Assignment
from learner.credit.normalisers import present
from learner.credit.rules import gains
from learner.credit.tables import RewardTables, along_windows
from learner.update.objective import PairLosses
from protocol.messages import ScoredGroup


@dataclass(frozen=True)
class PieceStatistics:
    """Statistics of one piece of a micro-batch, made by the worker that trained it and read by all workers."""

    order: tuple[int, int, int]
    """Optimizer step of the iteration, shard of the mini-batch, piece of the shard; each from 0."""
    loss: float
    """Sum over its pairs."""
    ratios: Float[np.ndarray, " N"] | None
    """None, with `outside`, for an objective without densities."""
    outside: Bool[np.ndarray, " N"] | None
    divergences: Float[np.ndarray, " M"]
    """Of the pairs that count."""
    numbers: Mapping[str, Float[np.ndarray, " M"]] = field(default_factory=dict)
    """`PairLosses.numbers` of the pairs that count."""

    @staticmethod
    def of(order: tuple[int, int, int], pairs: PairLosses, loss: float) -> "PieceStatistics":
        ratios, outside = pairs.ratio, pairs.outside
        return PieceStatistics(
            order=order,
            loss=loss,
            ratios=None if ratios is None else ratios.detach().cpu().numpy(),
            outside=None if outside is None else outside.cpu().numpy(),
            divergences=pairs.kl[pairs.valid].cpu().numpy(),
            numbers={name: values[pairs.valid].cpu().numpy() for name, values in pairs.numbers.items()},
        )


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of one optimizer step; the same on every worker."""

    pairs: int
    """Number of pairs over which its loss is averaged."""
    grad_norm: float | None
    """Before clipping; None, with `zeros`, if no step was taken."""
    zeros: float | None = None
    """The gradient's `zero_share`."""


def zero_share(parameters: Mapping[str, nn.Parameter]) -> float:
    """Compute the share of zeros in an adapter's gradient.

    A matrix A whose B is still all 0 is left out: there the gradient of A is 0 by its definition, B^T times something.

    Args:
        parameters: by name; a parameter without a gradient is left out.

    Returns:
        The share, in [0, 1]; 0 if nothing is left.
    """
    gradients = [
        parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and ("lora_A" not in name or parameters[name.replace("lora_A", "lora_B")].any())
    ]
    if not gradients:
        return 0.0
    elements = sum(gradient.numel() for gradient in gradients)
    device = gradients[0].device  # a model may be on several
    return 1 - torch.stack([gradient.count_nonzero().to(device) for gradient in gradients]).sum().item() / elements


def update_metrics(
    pieces: Iterable[PieceStatistics], steps: Sequence[StepStatistics], *, has_ratios: bool = True
) -> dict[str, float]:
    """Compute an update's metrics; ratios of the first optimizer step show whether learner and rollout agree.

    Args:
        pieces: statistics of all workers, in any order.
        steps: the iteration's optimizer steps.
        has_ratios: whether the objective has densities; without them there are no metrics about ratios.

    Returns:
        Numbers by name; the same bits for any number of workers.
    """
    ordered = sorted(pieces, key=lambda piece: piece.order)
    losses = [piece.loss / steps[piece.order[0]].pairs for piece in ordered]
    grad_norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    zeros = [step.zeros for step in steps if step.zeros is not None]
    return {
        "train/loss": float(np.sum(losses)) / max(1, len(grad_norms)),
        "train/grad_norm": float(np.mean(grad_norms)) if grad_norms else 0.0,
        **({"train/zero_gradients": float(np.mean(zeros))} if zeros else {}),
        **(_ratios(ordered) if has_ratios else {}),
        "train/reference_kl": _joined([piece.divergences for piece in ordered], empty=0.0).mean().item(),
        **_numbers(ordered),
    }


def _ratios(ordered: Sequence[PieceStatistics]) -> dict[str, float]:
    ratios = _joined([piece.ratios for piece in ordered if piece.ratios is not None], empty=1.0)
    held = [piece.ratios for piece in ordered if piece.ratios is not None and not piece.order[0]]
    outside = [piece.outside for piece in ordered if piece.outside is not None]
    return {
        "train/ratio_mean": ratios.mean().item(),
        "train/first_ratio_deviation": (_joined(held, empty=1.0) - 1).abs().max().item(),
        "train/clip_fraction": _joined(outside, empty=0.0).float().mean().item(),
        "train/approx_kl": (0.5 * ratios.log().square()).mean().item(),
    }


def _numbers(ordered: Sequence[PieceStatistics]) -> dict[str, float]:
    """Compute mean and std of `PieceStatistics.numbers` over all pairs that count."""
    metrics = {}
    for name in sorted({name for piece in ordered for name in piece.numbers}):
        values = np.concatenate([piece.numbers[name] for piece in ordered if name in piece.numbers])
        if len(values):
            metrics[f"train/{name}_mean"] = float(values.mean())
            metrics[f"train/{name}_std"] = float(values.std())
    return metrics


def group_metrics(groups: Sequence[ScoredGroup], tables: RewardTables, assignment: Assignment) -> dict[str, float]:
    """Compute rewards of the finished images, missing scores, gains and advantages by step.

    `reward/*` are means over finished images with a score; `reward/missing` counts images without one;
    `group/zero_variance` is the share of groups whose advantages are all 0, `group/unscored` the share of groups
    without a step reward; `group/duplicates` counts members of a group whose final latents equal another member's, bit
    for bit.
    """
    finals = tables.rewards[..., -1]
    known = present(finals)
    spreads = [present(final).std(correction=0).item() for final in finals if not final.isnan().all()]
    missing = sum(int((~shard.scores.valid).sum()) for group in groups for shard in group.shards)
    has_contrast = assignment.advantages.flatten(1).any(1)
    return {
        "reward/mean": known.mean().item() if len(known) else float("nan"),
        "reward/group_std": float(np.mean(spreads)) if spreads else float("nan"),
        "reward/missing": float(missing),
        "group/zero_variance": float(np.mean((~has_contrast).numpy())),
        "group/unscored": float(np.mean(assignment.step_rewards.isnan().flatten(1).all(1).numpy())),
        "group/duplicates": float(sum(map(_duplicates, groups))),
        **_final_scores(tables),
        **_by_step(assignment),
        **_gains_by_reward(tables),
        **_slopes(assignment),
    }


def _final_scores(tables: RewardTables) -> dict[str, float]:
    finals = {name: table[..., -1].flatten().numpy() for name, table in tables.scores.items()}
    return {
        f"reward/{name}": float(np.nanmean(final)) if np.isfinite(final).any() else float("nan")
        for name, final in finals.items()
    }


def _by_step(assignment: Assignment) -> dict[str, float]:
    metrics = {}
    for k in range(assignment.step_rewards.shape[-1]):
        step_rewards = assignment.step_rewards[..., k]
        values, advantages = present(step_rewards), assignment.advantages[..., k][~step_rewards.isnan()]
        if len(values):
            metrics[f"step_reward/step_{k}_abs_mean"] = values.abs().mean().item()
            metrics[f"step_reward/step_{k}_zero_share"] = (values == 0).float().mean().item()
            metrics[f"advantage/step_{k}_mean"] = advantages.mean().item()
            metrics[f"advantage/step_{k}_std"] = advantages.std(correction=0).item()
    return metrics


def _gains_by_reward(tables: RewardTables) -> dict[str, float]:
    """Compute mean and mean absolute value of each reward's own gains by step, if several rewards scored the points."""
    names = [name for name in tables.scores if "/" not in name]
    metrics = {}
    for name in names if len(names) > 1 else []:
        by_step = along_windows(gains, tables.scores[name], tables.explored, tables.skipped)
        for k in range(by_step.shape[-1]):
            if len(values := present(by_step[..., k]).numpy()):
                metrics[f"gain/{name}/step_{k}_mean"] = float(values.mean())
                metrics[f"gain/{name}/step_{k}_abs_mean"] = float(np.abs(values).mean())
    return metrics


def _slopes(assignment: Assignment) -> dict[str, float]:
    held = [] if assignment.slopes is None else assignment.slopes.tolist()
    return {f"credit/step_{k}_slope": slope for k, slope in enumerate(held) if not math.isnan(slope)}


def _duplicates(group: ScoredGroup) -> int:
    finals = [final for shard in group.shards for final in shard.facts.finals]
    return len(finals) - len(set(finals))


def _joined(parts: Sequence[Float[np.ndarray, " N"]], *, empty: float) -> Float[Tensor, " M"]:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.tensor([empty])
