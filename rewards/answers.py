"""Building a scorer's answer: all images judged, or some of them missing with a reason.

return judged([0.2, 0.9])
return partly([0.2, nan], ["", "the engine failed"])
"""

from collections.abc import Mapping, Sequence

import numpy as np

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
