"""The original code's rewards with their quirks, for each task kind; worked by hand from its rules."""

import math

import pytest

from protocol.messages import Detection
from rewards.geneval.clauses import read_clauses
from rewards.geneval.original import judge_original
from rewards.geneval.verdict import judge
from rewards.scorer import build_scorer

LEFT, RIGHT, MIDDLE = (0.0, 40.0, 10.0, 50.0), (80.0, 40.0, 90.0, 50.0), (40.0, 40.0, 50.0, 50.0)


def seen(label: str, *, color: str | None = None, box: tuple[float, float, float, float] = MIDDLE, score: float = 0.9):
    return Detection(label=label, color=color, box=box, score=score)


def line(tag: str, *include: dict, exclude: list[dict] | None = None) -> dict:
    return {"tag": tag, "include": list(include)} | ({"exclude": exclude} if exclude else {})


CAT, DOG = {"class": "cat", "count": 1}, {"class": "dog", "count": 1}
COUNT3 = line("counting", {"class": "cat", "count": 3}, exclude=[{"class": "cat", "count": 4}])
PLACED = line("position", CAT, DOG | {"position": ["left of", 0]})
ATTR = line("color_attr", CAT | {"color": "red"}, DOG | {"color": "blue"})


@pytest.mark.parametrize(
    ("kind", "metadata", "found", "soft", "strict", "correct"),
    [
        ("single: there", line("single_object", CAT), [seen("cat")], 1, True, True),
        ("single: one too many is 0 and not strict", line("single_object", CAT), [seen("cat")] * 2, 0, False, True),
        ("single: three too many go below 0", line("single_object", CAT), [seen("cat")] * 4, -2, False, True),
        ("single: nothing", line("single_object", CAT), [], 0, False, False),
        ("two: one missing", line("two_object", CAT, DOG), [seen("cat")], 1 / 2, False, False),
        (
            "two: both, a bystander is ignored",
            line("two_object", CAT, DOG),
            [seen("cat"), seen("dog"), seen("cow")],
            1,
            True,
            True,
        ),
        ("counting: three", COUNT3, [seen("cat")] * 3, 1, True, True),
        ("counting: two", COUNT3, [seen("cat")] * 2, 2 / 3, False, False),
        ("counting: four are forbidden", COUNT3, [seen("cat")] * 4, 2 / 3, False, False),
        ("counting: seven", COUNT3, [seen("cat")] * 7, -1 / 3, False, False),
        ("colors: right", line("colors", CAT | {"color": "red"}), [seen("cat", color="red")], 1, True, True),
        (
            "colors: wrong colour",
            line("colors", CAT | {"color": "red"}),
            [seen("cat", color="blue")],
            1 / 2,
            False,
            False,
        ),
        (
            "colors: a count miss adds one 0",
            line("colors", CAT | {"color": "red"}),
            [seen("cat", color="red")] * 2,
            0,
            False,
            True,
        ),
        ("colors: nothing, two terms of 0", line("colors", CAT | {"color": "red"}), [], 0, False, False),
        ("position: holds", PLACED, [seen("cat", box=RIGHT), seen("dog", box=LEFT)], 1, True, True),
        (
            "position: fails and adds 0 and 1",
            PLACED,
            [seen("cat", box=LEFT), seen("dog", box=RIGHT)],
            3 / 4,
            False,
            False,
        ),
        ("position: the reference is missing", PLACED, [seen("dog", box=LEFT)], (0 + 1 + 0) / 3, False, False),
        ("position: the placed one is missing", PLACED, [seen("cat", box=LEFT)], (1 + 0 + 0) / 3, False, False),
        ("color_attr: right", ATTR, [seen("cat", color="red"), seen("dog", color="blue")], 1, True, True),
        ("color_attr: swapped", ATTR, [seen("cat", color="blue"), seen("dog", color="red")], 1 / 2, False, False),
        ("color_attr: one missing", ATTR, [seen("cat", color="red")], (1 + 1 + 0 + 0) / 4, False, False),
    ],
)
def test_the_original_s_reading(kind, metadata, found, soft, strict, correct) -> None:
    verdict = judge_original(found, read_clauses(metadata))
    assert math.isclose(verdict.soft, soft, abs_tol=1e-12), kind
    assert (verdict.strict, verdict.correct) == (strict, correct), kind


def test_strict_ignores_exclude_in_the_original_and_not_in_the_sound_version() -> None:
    metadata = line("single_object", CAT, exclude=[{"class": "dog", "count": 1}])
    found = [seen("cat"), seen("dog")]
    assert (judge_original(found, read_clauses(metadata)).strict, judge(found, read_clauses(metadata)).strict) == (
        True,
        False,
    )
    assert not judge_original(found, read_clauses(metadata)).correct


def test_only_the_best_sixteen_objects_of_a_class_count() -> None:
    metadata = line("counting", {"class": "cat", "count": 16})
    assert judge_original([seen("cat")] * 40, read_clauses(metadata)).soft == 1


def test_compat_changes_the_scorer_s_readings_and_its_range() -> None:
    import numpy as np

    sound, original = (
        build_scorer("geneval", detector=f"{__name__}:FourCats", compat=c) for c in ("sound", "original")
    )
    images = np.zeros((1, 4, 4, 3), np.uint8)
    answers = [scorer.score(images, [""], [line("single_object", CAT)]).values[0] for scorer in (sound, original)]
    assert answers == [0, -2]
    assert (sound.low, original.low) == (0, -math.inf)


class FourCats:
    """Sees four cats in every image."""

    def detect(self, images, colored):
        return [[seen("cat")] * 4 for _ in images]
