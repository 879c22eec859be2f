"""GenEval's judgement by hand: boxes are written down, grades are worked out beside the numbers."""

from collections.abc import Sequence
from typing import Any

import pytest

from protocol.messages import Detection
from rewards.geneval.clauses import Clauses, read_clauses
from rewards.geneval.verdict import Verdict, judge, relations


def seen(
    label: str, *, color: str | None = "red", at: tuple[float, float] = (0, 0), size: float = 10, score: float = 0.9
) -> Detection:
    """A square box of side `size` centred on `at`."""
    x, y = at
    half = size / 2
    return Detection(label=label, color=color, box=(x - half, y - half, x + half, y + half), score=score)


def line(tag: str, *include: dict[str, Any], exclude: Sequence[dict[str, Any]] = ()) -> Clauses:
    return read_clauses({"tag": tag, "include": list(include), "exclude": list(exclude), "prompt": "a photo"})


def wants(label: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": label, "count": count, **more}


def verdict(soft: float, *, strict: bool, correct: bool) -> Verdict:
    near: Any = pytest.approx(soft)
    return Verdict(soft=near, strict=strict, correct=correct)


ONE = line("single_object", wants("circle"))
TWO = line("two_object", wants("circle"), wants("square"))
THREE = line("counting", wants("circle", 3), exclude=[wants("circle", 4)])
RED = line("colors", wants("circle", color="red"))
LEFT = line("position", wants("square"), wants("circle", position=["left of", 0]))
PAIR = line("color_attr", wants("circle", color="red"), wants("square", color="blue"))


def test_single_object_is_right_when_there_once() -> None:
    assert judge([seen("circle")], ONE) == verdict(1, strict=True, correct=True)


def test_single_object_there_twice_is_officially_correct_but_neither_strict_nor_soft() -> None:
    # count: 1 - |2 - 1| / 1 = 0
    assert judge([seen("circle"), seen("circle", at=(50, 0))], ONE) == verdict(0, strict=False, correct=True)


def test_objects_of_unmentioned_classes_are_ignored() -> None:
    assert judge([seen("circle"), seen("triangle"), seen("square")], ONE) == verdict(1, strict=True, correct=True)


def test_two_objects_earn_half_for_one_of_them() -> None:
    assert judge([seen("square")], TWO) == verdict(0.5, strict=False, correct=False)
    assert judge([seen("square"), seen("circle")], TWO) == verdict(1, strict=True, correct=True)


@pytest.mark.parametrize(
    ("found", "soft"), [(0, 0), (1, 1 / 3), (2, 2 / 3), (3, 1), (4, 2 / 3), (5, 1 / 3), (6, 0), (9, 0)]
)
def test_counting_three_loses_a_third_for_each_object_missing_or_too_many_and_is_never_negative(
    found: int, soft: float
) -> None:
    objects = [seen("circle", at=(20 * i, 0)) for i in range(found)]
    # four or more also break the exclusion of a fourth, so the official verdict falls too
    assert judge(objects, THREE) == verdict(soft, strict=found == 3, correct=found == 3)


def test_counting_without_exclusion_is_officially_correct_with_more() -> None:
    objects = [seen("circle", at=(20 * i, 0)) for i in range(4)]
    three_or_more = line("counting", wants("circle", 3))
    assert judge(objects, three_or_more) == verdict(2 / 3, strict=False, correct=True)


def test_the_wrong_colour_costs_the_colour_grade_only() -> None:
    # count 1, colour 0
    assert judge([seen("circle", color="blue")], RED) == verdict(0.5, strict=False, correct=False)
    assert judge([seen("circle", color=None)], RED) == verdict(0.5, strict=False, correct=False)
    assert judge([seen("circle")], RED) == verdict(1, strict=True, correct=True)


def test_the_right_colour_on_another_class_does_not_count() -> None:
    objects = [seen("circle", color="blue"), seen("square", color="red")]
    assert judge(objects, RED) == verdict(0.5, strict=False, correct=False)


def test_official_colour_looks_at_the_best_scored_box_only() -> None:
    # count: 1 - |2 - 1| / 1 = 0; colour: exactly one red circle = 1; mean 1/2
    red_first = [seen("circle", color="blue", score=0.5), seen("circle", color="red", score=0.8)]
    blue_first = [seen("circle", color="blue", score=0.8), seen("circle", color="red", score=0.5)]
    assert judge(red_first, RED) == verdict(0.5, strict=False, correct=True)
    assert judge(blue_first, RED) == verdict(0.5, strict=False, correct=False)


def test_colours_of_several_are_graded_by_how_many_fit() -> None:
    two_red = line("colors", wants("circle", 2, color="red"))
    # count 1, colour 1 - |1 - 2| / 2 = 1/2; mean 3/4
    objects = [seen("circle", color="red"), seen("circle", color="blue", at=(30, 0))]
    assert judge(objects, two_red) == verdict(0.75, strict=False, correct=False)


def test_a_colour_keeps_its_grade_when_the_count_is_wrong() -> None:
    # Flow-GRPO's own code would add a 0 here; ours: count 0 (two for one), colour 1 (one red), mean 1/2
    objects = [seen("circle", color="red"), seen("circle", color="blue", at=(30, 0), score=0.2)]
    assert judge(objects, RED).soft == pytest.approx(0.5)


def test_position_right_is_full_and_wrong_costs_one_grade_of_three() -> None:
    left = [seen("square", at=(60, 0)), seen("circle", at=(0, 0))]
    right = [seen("square", at=(0, 0)), seen("circle", at=(60, 0))]
    assert judge(left, LEFT) == verdict(1, strict=True, correct=True)
    assert judge(right, LEFT) == verdict(2 / 3, strict=False, correct=False)


def test_position_needs_both_objects() -> None:
    # counts 0 and 1, position 0
    assert judge([seen("circle")], LEFT) == verdict(1 / 3, strict=False, correct=False)


def test_position_is_judged_on_the_best_scored_boxes_when_there_are_too_many() -> None:
    square, faint = seen("square", at=(60, 0)), seen("circle", at=(120, 0), score=0.2)
    # counts: square 1, circle 1 - |2 - 1| / 1 = 0; the best circle lies left: 1; mean 2/3
    assert judge([faint, square, seen("circle", at=(0, 0))], LEFT) == verdict(2 / 3, strict=False, correct=True)
    # the best circle lies right: counts 1 and 0, position 0
    best_right = [seen("circle", at=(120, 0)), square, seen("circle", at=(0, 0), score=0.2)]
    assert judge(best_right, LEFT) == verdict(1 / 3, strict=False, correct=False)


def test_position_must_hold_for_every_pair() -> None:
    two_left = line("position", wants("square"), wants("circle", 2, position=["left of", 0]))
    square = seen("square", at=(60, 0))
    assert judge([square, seen("circle"), seen("circle", at=(20, 0))], two_left).correct
    assert not judge([square, seen("circle"), seen("circle", at=(120, 0))], two_left).correct


def test_swapped_colours_earn_half() -> None:
    # counts 1 and 1, colours 0 and 0
    swapped = [seen("circle", color="blue"), seen("square", color="red")]
    assert judge(swapped, PAIR) == verdict(0.5, strict=False, correct=False)
    # counts 1 and 1, colours 1 and 0
    half = [seen("circle", color="red"), seen("square", color="red")]
    assert judge(half, PAIR) == verdict(0.75, strict=False, correct=False)
    right = [seen("circle", color="red"), seen("square", color="blue")]
    assert judge(right, PAIR) == verdict(1, strict=True, correct=True)


def test_one_class_in_two_colours_needs_both_colours() -> None:
    both = line("color_attr", wants("circle", color="red"), wants("circle", color="blue"))
    red, blue = seen("circle", color="red"), seen("circle", color="blue", at=(30, 0))
    assert judge([red, blue], both) == verdict(1, strict=True, correct=True)
    # circles 2 of 2: 1; red 1 - |2 - 1| / 1 = 0; blue 0; mean 1/3
    assert judge([red, red], both) == verdict(1 / 3, strict=False, correct=False)


def test_an_exclusion_of_another_class_is_a_clause_of_its_own() -> None:
    no_square = line("single_object", wants("circle"), exclude=[wants("square", 1)])
    assert judge([seen("circle")], no_square) == verdict(1, strict=True, correct=True)
    # count 1, exclusion 0
    assert judge([seen("circle"), seen("square")], no_square) == verdict(0.5, strict=False, correct=False)


def test_an_exclusion_allows_fewer_than_its_count() -> None:
    at_most_one = line("single_object", wants("circle"), exclude=[wants("square", 2)])
    assert judge([seen("circle"), seen("square")], at_most_one) == verdict(1, strict=True, correct=True)


def test_avoiding_something_earns_nothing_without_an_included_object() -> None:
    no_square = line("single_object", wants("circle"), exclude=[wants("square", 1)])
    assert judge([], no_square) == verdict(0, strict=False, correct=False)


@pytest.mark.parametrize("clauses", [ONE, TWO, THREE, RED, LEFT, PAIR])
def test_an_empty_image_scores_zero_for_each_kind(clauses: Clauses) -> None:
    assert judge([], clauses) == verdict(0, strict=False, correct=False)


def box(x: float, y: float, size: float = 10) -> tuple[float, float, float, float]:
    return seen("any", at=(x, y), size=size).box


def test_each_relation_has_its_direction_with_y_down() -> None:
    assert relations(box(0, 50), box(50, 50)) == {"left of"}
    assert relations(box(50, 50), box(0, 50)) == {"right of"}
    assert relations(box(50, 0), box(50, 50)) == {"above"}
    assert relations(box(50, 50), box(50, 0)) == {"below"}


def test_inside_the_dead_zone_there_is_no_relation() -> None:
    # sizes 10 + 10, dead zone 2
    assert relations(box(0, 0), box(0, 0)) == set()
    assert relations(box(2, 0), box(0, 0)) == set()


def test_a_relation_begins_above_one_half_of_the_normalised_offset() -> None:
    # (4 - 2) / 4 = 0.5 is not above it; (4.5 - 2) / 4.5 = 0.556 is
    for x, y, relation in ((1, 0, "right of"), (-1, 0, "left of"), (0, 1, "below"), (0, -1, "above")):
        assert relations(box(4 * x, 4 * y), box(0, 0)) == set()
        assert relations(box(4.5 * x, 4.5 * y), box(0, 0)) == {relation}


def test_overlapping_boxes_still_have_a_relation() -> None:
    # the boxes share half their width: (5 - 2) / 5 = 0.6
    assert relations(box(0, 0), box(5, 0)) == {"left of"}


def test_a_diagonal_has_two_relations_and_a_slant_one() -> None:
    # (20 - 2) / 28.28 = 0.636 on both axes
    assert relations(box(20, 20), box(0, 0)) == {"right of", "below"}
    # across (20 - 2) / 22.36 = 0.805, down (10 - 2) / 22.36 = 0.358
    assert relations(box(20, 10), box(0, 0)) == {"right of"}


def test_the_dead_zone_grows_with_both_boxes() -> None:
    # sizes 60 + 10, dead zone 7: (10 - 7) / 10 = 0.3
    assert relations(box(10, 0, size=60), box(0, 0)) == set()
    assert relations(box(0, 0), box(10, 0, size=60)) == set()
