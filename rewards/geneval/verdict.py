"""GenEval's verdict on one image: a pure function of the detections and the prompt's clauses.

The official verdict and the spatial rule are GenEval's (Ghosh et al. 2023, arXiv 2310.11513). The soft score is
the training reward of Flow-GRPO (arXiv 2505.05470), bounded to [0, 1]. Each clause always has exactly one grade, so the
mean over a prompt's clauses has the same denominator for every image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.messages import Detection
from rewards.geneval.clauses import Clauses, Included

DEAD_ZONE = 0.1
"""Share of the summed sizes by which an offset of centres is shortened."""
CLEAR = 0.5
"""Component of the normalised offset above which a relation holds."""

Box = tuple[float, float, float, float]
Ranked = dict[str, list[Detection]]
"""Detections of each class that the prompt mentions, best score first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The three scores of one image."""

    soft: float
    """Mean grade of the clauses, in [0, 1]."""
    strict: bool
    """`correct`, and the image shows exactly the required number of each included class."""
    correct: bool
    """GenEval's official verdict, which requires at least that number."""


def judge(detections: Sequence[Detection], clauses: Clauses) -> Verdict:
    """Judge one image.

    `soft` is the mean of the clauses' grades. With n the required count, they are

        count      of each included class     max(0, 1 - |found - n| / n)
        colour     of each coloured item      max(0, 1 - |found with this class and colour - n| / n)
        position   of each positioned item    1 if its n best objects all have this relation to the reference's, else 0
        exclusion  of each class not included 1 if found < count, else 0

    An exclusion of a class that is also included (GenEval's counting prompts: "three", not four) has no separate grade,
    since the count grade already measures it. It counts for `strict` and `correct` only. Examples:

        single_object  {count}                     2 found for 1: 0        (soft)
        two_object     {count, count}              one of the two: 1/2
        counting       {count}, n = 3              2 or 4 found: 2/3; 6 or more: 0
        colors         {count, colour}             right shape, wrong colour: 1/2
        position       {count, count, position}    both found, wrong relation: 2/3
        color_attr     2 x {count, colour}         colours swapped: 1/2

    As in GenEval, all three scores ignore objects of classes that the prompt does not mention: "a red circle" is
    strictly right even if a square is next to it. An image without any included object has the soft score 0, whatever
    the prompt excludes.

    `correct` is the official verdict. Each item needs n objects of its colour among the best-scored boxes of its class;
    only as many boxes are considered as the prompt requires. Each positioned item must have its relation to every
    reference object, and each excluded class fewer than `count` objects. `strict` also requires the exact number of
    each included class.

    Args:
        detections: the objects found in the image, in any order.
        clauses: the prompt's, from `read_clauses`.
    """
    ranked = rank(detections, clauses)
    correct = _is_correct(ranked, clauses)
    exact = all(len(ranked[label]) == count for label, count in clauses.wanted.items())
    return Verdict(soft=_soft_score(ranked, clauses), strict=correct and exact, correct=correct)


def relations(first: Box, second: Box) -> frozenset[str]:
    """Return the relations of the first box to the second by GenEval's spatial rule; diagonal boxes have two.

        offset  = centre(first) - centre(second)
        revised = sign(offset) max(|offset| - 0.1 (size(first) + size(second)), 0)      axis by axis
        dx, dy  = revised / ||offset||

    The relation is left of if dx < -0.5, right of if dx > 0.5, above if dy < -0.5, below if dy > 0.5 (y points down),
    and none if `revised` is zero (below 1e-3 pixel).

    Args:
        first: x0, y0, x1, y1 in pixels, y pointing down.
    """
    a, b = np.asarray(first).reshape(2, 2), np.asarray(second).reshape(2, 2)
    offset = a.mean(axis=0) - b.mean(axis=0)
    sizes = np.abs(a[1] - a[0]) + np.abs(b[1] - b[0])
    revised = np.sign(offset) * np.maximum(np.abs(offset) - DEAD_ZONE * sizes, 0)
    if np.all(np.abs(revised) < 1e-3):
        return frozenset()
    dx, dy = revised / np.linalg.norm(offset)
    holds = {"left of": dx < -CLEAR, "right of": dx > CLEAR, "above": dy < -CLEAR, "below": dy > CLEAR}
    return frozenset(name for name, is_so in holds.items() if is_so)


def rank(detections: Sequence[Detection], clauses: Clauses) -> Ranked:
    """Return the detections of each class that the prompt mentions, best score first."""
    labels = [item.label for item in (*clauses.include, *clauses.exclude)]
    best_first = sorted(detections, key=lambda found: -found.score)
    return {label: [found for found in best_first if found.label == label] for label in labels}


def _soft_score(ranked: Ranked, clauses: Clauses) -> float:
    if not any(ranked[label] for label in clauses.wanted):
        return 0.0
    grades = [_closeness(len(ranked[label]), count) for label, count in clauses.wanted.items()]
    chosen = [_choose(ranked[item.label], item) for item in clauses.include]
    for index, item in enumerate(clauses.include):
        if item.color is not None:
            coloured = sum(found.color == item.color for found in ranked[item.label])
            grades.append(_closeness(coloured, item.count))
        if item.position is not None:
            grades.append(float(_is_placed(index, chosen, clauses)))
    for item in clauses.exclude:
        if item.label not in clauses.wanted:
            grades.append(float(len(ranked[item.label]) < item.count))
    return sum(grades) / len(grades)


def _is_correct(ranked: Ranked, clauses: Clauses) -> bool:
    best = {label: ranked[label][:count] for label, count in clauses.wanted.items()}
    chosen = [_choose(best[item.label], item) for item in clauses.include]
    return (
        all(len(objects) == item.count for objects, item in zip(chosen, clauses.include, strict=True))
        and all(_is_placed(i, chosen, clauses) for i, item in enumerate(clauses.include) if item.position is not None)
        and all(len(ranked[item.label]) < item.count for item in clauses.exclude)
    )


def _closeness(found: int, wanted: int) -> float:
    return max(0.0, 1 - abs(found - wanted) / wanted)


def _choose(objects: Sequence[Detection], item: Included) -> list[Detection]:
    """Return the item's best `count` objects of the required colour, or all if there are fewer."""
    fitting = [found for found in objects if item.color is None or found.color == item.color]
    return fitting[: item.count]


def _is_placed(index: int, chosen: Sequence[Sequence[Detection]], clauses: Clauses) -> bool:
    item = clauses.include[index]
    if item.position is None:
        return True
    relation, reference = item.position
    if len(chosen[index]) < item.count or len(chosen[reference]) < clauses.include[reference].count:
        return False
    pairs = ((first, second) for first in chosen[index] for second in chosen[reference])
    return all(relation in relations(first.box, second.box) for first, second in pairs)
