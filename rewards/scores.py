"""Operations on `Scores`: building an answer, cutting and joining answers, mixing scorers, applying the failure policy.

return judged([0.2, 0.9])
return partly([0.2, nan], ["", "the engine failed"])
reward = mix({"ocr": a, "pickscore": b}, {"ocr": 0.8, "pickscore": 0.2})
shown = with_observed(reward, {"aesthetic": c})        # shown, but no part of the reward
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from protocol.config.reward import RewardConfig
from protocol.errors import ContractError, RewardError
from protocol.messages import Scores

Numbers = Sequence[float] | np.ndarray


def judged(values: Numbers, components: Mapping[str, Numbers] | None = None) -> Scores:
    """Scores of B images that are all valid; `components` are further readings [B] by name."""
    return partly(values, [""] * len(values), components)


def partly(values: Numbers, reasons: Sequence[str], components: Mapping[str, Numbers] | None = None) -> Scores:
    """Scores of B images, missing where `reasons` says why; a missing image's numbers become NaN."""
    valid = np.array([not reason for reason in reasons], bool)

    def kept(numbers: Numbers) -> np.ndarray:
        return np.where(valid, np.asarray(numbers, np.float32), np.float32("nan"))

    return Scores(
        values=kept(values),
        valid=valid,
        reasons=tuple(reasons),
        components={name: kept(numbers) for name, numbers in (components or {}).items()},
    )


def rows_of(scores: Scores, rows: Sequence[int] | slice) -> Scores:
    """The answer about some of the images."""
    places = range(len(scores.reasons))[rows] if isinstance(rows, slice) else rows
    index = np.asarray(list(places), np.int64)
    return Scores(
        values=scores.values[index],
        valid=scores.valid[index],
        reasons=tuple(scores.reasons[place] for place in index),
        components={name: numbers[index] for name, numbers in scores.components.items()},
        voids_group=scores.voids_group,
    )


def patched(scores: Scores, rows: Sequence[int], answer: Scores) -> Scores:
    """The same answer with some of its images judged anew."""
    order = np.arange(len(scores.reasons))
    order[np.asarray(rows)] = len(order) + np.arange(len(rows))
    return rows_of(joined([scores, answer]), order.tolist())


def joined(parts: Sequence[Scores]) -> Scores:
    """Answers about consecutive images as one; a component that one part lacks is NaN there."""
    names = dict.fromkeys(name for part in parts for name in part.components)
    return Scores(
        values=np.concatenate([part.values for part in parts]),
        valid=np.concatenate([part.valid for part in parts]),
        reasons=tuple(reason for part in parts for reason in part.reasons),
        components={
            name: np.concatenate(
                [part.components.get(name, np.full(len(part.reasons), np.nan, np.float32)) for part in parts]
            )
            for name in names
        },
        voids_group=any(part.voids_group for part in parts),
    )


def mix(scores: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """Weighted sum of several scorers' answers about the same B images: value_b = sum_s weights[s] values[s]_b.

    Valid only where every scorer is valid; elsewhere NaN, and the reasons of all failed scorers joined by "; ".
    Components: each scorer's value under its name, its components under `<scorer>/<component>`. Raw scores are summed,
    not standardised (Flow-GRPO's multi_score). One answer that voids the group makes the mixture void it.

    Raises:
        ContractError: no scores, weights for other names than the scores', or scores of different lengths.
    """
    if not scores or set(scores) != set(weights):
        raise ContractError(f"weights must name the scorers {sorted(scores)}, got {sorted(weights)}")
    _require_one_length(scores)
    valid = np.logical_and.reduce([item.valid for item in scores.values()])
    total = np.sum([weights[name] * item.values.astype(np.float64) for name, item in scores.items()], axis=0)
    readings = _readings(scores)
    return Scores(
        values=_where_valid(valid, total),
        valid=valid,
        reasons=tuple("; ".join(filter(None, row)) for row in zip(*(s.reasons for s in scores.values()), strict=True)),
        components={name: _where_valid(valid, reading) for name, reading in readings.items()},
        voids_group=any(item.voids_group for item in scores.values()),
    )


def with_observed(reward: Scores, observed: Mapping[str, Scores]) -> Scores:
    """The same reward with the readings of scorers that never train beside it, NaN where they have none.

    Raises:
        ContractError: scores of different lengths.
    """
    _require_one_length({"the reward": reward, **observed})
    return replace(reward, components={**reward.components, **_readings(observed)})


def _readings(scores: Mapping[str, Scores]) -> dict[str, np.ndarray]:
    readings = {name: item.values for name, item in scores.items()}
    for name, item in scores.items():
        readings |= {f"{name}/{part}": component for part, component in item.components.items()}
    return readings


def _require_one_length(scores: Mapping[str, Scores]) -> None:
    sizes = {name: len(item.reasons) for name, item in scores.items()}
    if len(set(sizes.values())) > 1:
        raise ContractError(f"scores of one mixture must have one length, got {sizes}")


def _where_valid(valid: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.where(valid, numbers, np.nan).astype(np.float32)


log = logging.getLogger(__name__)


def settle(name: str, config: RewardConfig, scores: Scores) -> Scores:
    """The scores as the failure policy of reward `name` leaves them.

    Raises:
        RewardError: a score is missing and the policy is `fail`.
    """
    if scores.valid.all():
        return scores
    count = int((~scores.valid).sum())
    reason = next(filter(None, scores.reasons))
    if config.on_failure == "fail":
        raise RewardError(
            f"reward {name} has no score for {count} of {len(scores.reasons)} images after {config.tries} tries:"
            f" {reason}; mend the scorer, or set rewards.{name}.on_failure to missing, drop_group or pause"
        )
    log.warning("reward %s: %d of %d images without a score: %s", name, count, len(scores.reasons), reason)
    return replace(scores, voids_group=config.on_failure == "drop_group")
