"""GenEval's scores exactly as the original code of Flow-GRPO computes them, for comparisons with its figures.

`judge_original` has the signature of `rewards.geneval.verdict.judge`. It differs from the sound version as follows:

- The terms of the soft score are 1 - |found - n| / n without a lower bound, so more than 2n objects give less than 0.
- An item with a wrong count adds one 0 if the prompt states a colour, a position or both, and then checks neither. So
  the number of terms depends on the image.
- A position that holds adds a 1; one that does not hold adds a 0 and a 1; an unmatched reference object adds a 0.
- `strict` requires the exact counts, colours and positions of `include`, and ignores `exclude`.
- If `include` names a class twice, each of the two items counts all objects of the class.
"""

from collections.abc import Sequence

from protocol.messages import Detection
from rewards.geneval.clauses import Clauses, Included
from rewards.geneval.verdict import Ranked, Verdict, rank, relations

MOST_OBJECTS = 16
"""Largest number of objects of one class that are considered, best score first."""


def judge_original(detections: Sequence[Detection], clauses: Clauses) -> Verdict:
    """Judge one image as the original code does; `correct` is GenEval's official verdict.

    Args:
        detections: the objects found in the image, in any order.
        clauses: the prompt's, from `read_clauses`.
    """
    ranked = {label: objects[:MOST_OBJECTS] for label, objects in rank(detections, clauses).items()}
    terms, strict = _soft_terms(ranked, clauses)
    return Verdict(soft=sum(terms) / len(terms), strict=strict, correct=_is_correct(ranked, clauses))


def _soft_terms(ranked: Ranked, clauses: Clauses) -> tuple[list[float], bool]:
    terms: list[float] = []
    matched: list[list[Detection] | None] = []
    for item in clauses.include:
        objects = ranked[item.label]
        terms.append(1 - abs(item.count - len(objects)) / item.count)
        if len(objects) != item.count:
            terms += [0.0] if item.color is not None or item.position is not None else []
            matched.append(None)
            continue
        is_matched = True
        if item.color is not None:
            coloured = _count_of_colour(objects, item)
            terms.append(1 - abs(item.count - coloured) / item.count)
            is_matched = coloured == item.count
        if item.position is not None and is_matched:
            reference = matched[item.position[1]]
            is_matched = reference is not None and _stands(objects, reference, item.position[0])
            if reference is None:
                terms.append(0.0)
            else:
                terms += [1.0] if is_matched else [0.0, 1.0]
        matched.append(objects if is_matched else None)
    return terms, all(group is not None for group in matched)


def _is_correct(ranked: Ranked, clauses: Clauses) -> bool:
    matched: list[list[Detection] | None] = []
    for item in clauses.include:
        objects = ranked[item.label][: item.count]
        is_matched = len(objects) == item.count
        if is_matched and item.color is not None:
            is_matched = _count_of_colour(objects, item) >= item.count
        if is_matched and item.position is not None:
            reference = matched[item.position[1]]
            is_matched = reference is not None and _stands(objects, reference, item.position[0])
        matched.append(objects if is_matched else None)
    is_free = all(len(ranked[item.label]) < item.count for item in clauses.exclude)
    return is_free and all(group is not None for group in matched)


def _count_of_colour(objects: Sequence[Detection], item: Included) -> int:
    return sum(found.color == item.color for found in objects)


def _stands(objects: Sequence[Detection], reference: Sequence[Detection], relation: str) -> bool:
    return all(relation in relations(first.box, second.box) for first in objects for second in reference)
