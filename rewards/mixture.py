"""Several scorers' answers about the same images as one: the weighted sum, each part beside it.

reward = mix({"ocr": a, "pickscore": b}, {"ocr": 0.8, "pickscore": 0.2})
shown = with_observed(reward, {"aesthetic": c})        # read, but no part of the reward
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from protocol.errors import ContractError
from protocol.messages import Scores


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
