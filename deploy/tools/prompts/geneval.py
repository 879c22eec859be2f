"""Makes training prompts for GenEval (arXiv 2310.11513) from the forms of its six tasks, without its 553 test prompts.

The classes, colours and forms of the sentences are GenEval's; the share of each task is as in Flow-GRPO's training
set (`dataset/merge_genevaltask.py` of its released code). A task with fewer prompts than its share repeats all of them
equally often.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from protocol.ground.resources import resolve
from rewards.geneval.clauses import RELATIONS
from rewards.geneval.photo_detector import COLORS

Line = dict[str, Any]
CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
"""COCO's 80 classes by GenEval's names."""
COLORED = CLASSES[1:]
"""A person has no colour."""
NUMBERS = {2: "two", 3: "three", 4: "four"}
SHARES = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1, "single_object": 0}
TEST = "pkg://deploy/prompts/geneval_test.sha256"
"""First 16 hex digits of the sha256 of each of the 553 test prompts, one a line."""


def geneval_prompts(count: int, *, seed: int) -> list[Line]:
    """Make lines of a prompt file with GenEval's metadata.

    Args:
        count: number of lines, at least 1.
        seed: seed of their choice and order, at least 0.

    Returns:
        Lines with `tag`, `include`, `prompt` and, where an image may not hold more, `exclude`.
    """
    rng = np.random.default_rng(seed)
    lines = [line for tag, quota in quotas(count).items() for line in _drawn(tag, quota, rng)]
    return [lines[index] for index in rng.permutation(len(lines))]


def quotas(count: int) -> dict[str, int]:
    """Divide a number of lines among the tasks by `SHARES`; the largest remainders are rounded up."""
    whole = sum(SHARES.values())
    found = {tag: count * share // whole for tag, share in SHARES.items()}
    by_remainder = sorted(SHARES, key=lambda tag: -(count * SHARES[tag] % whole))
    return {tag: found[tag] + (tag in by_remainder[: count - sum(found.values())]) for tag in SHARES}


def _drawn(tag: str, quota: int, rng: np.random.Generator) -> Iterator[Line]:
    size, make = TASKS[tag]
    drawn = 0
    while drawn < quota:
        for index in rng.permutation(size):
            line = make(int(index))
            if is_test(line["prompt"]):
                continue
            yield line
            drawn += 1
            if drawn == quota:
                break


def is_test(prompt: str) -> bool:
    """Tell whether a prompt is one of GenEval's test prompts."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16] in _tests()


@cache
def _tests() -> frozenset[str]:
    return frozenset(resolve(TEST).read_text().split())


def _single(index: int) -> Line:
    return _line("single_object", [_object(CLASSES[index])], _a(CLASSES[index]))


def _two(index: int) -> Line:
    first, second = _pair(index, CLASSES)
    return _line("two_object", [_object(first), _object(second)], f"{_a(first)} and {_a(second)}")


def _counting(index: int) -> Line:
    label, number = CLASSES[index // len(NUMBERS)], index % len(NUMBERS) + min(NUMBERS)
    several = label + ("es" if label.endswith("s") else "s")
    line = _line("counting", [{"class": label, "count": number}], f"{NUMBERS[number]} {several}")
    return line | {"exclude": [{"class": label, "count": number + 1}]}


def _colors(index: int) -> Line:
    label, color = COLORED[index // len(COLORS)], COLORS[index % len(COLORS)]
    return _line("colors", [_object(label, color=color)], f"{_a(color)} {label}")


def _position(index: int) -> Line:
    relation = RELATIONS[index % len(RELATIONS)]
    first, second = _pair(index // len(RELATIONS), CLASSES)
    include = [_object(second), _object(first, position=[relation, 0])]
    return _line("position", include, f"{_a(first)} {relation} {_a(second)}")


def _color_attr(index: int) -> Line:
    pairs = len(COLORS) * (len(COLORS) - 1)
    (first, second), (one, other) = _pair(index // pairs, COLORED), _pair(index % pairs, COLORS)
    include = [_object(first, color=one), _object(second, color=other)]
    return _line("color_attr", include, f"{_a(one)} {first} and {_a(other)} {second}")


Make = Callable[[int], Line]
TASKS: Mapping[str, tuple[int, Make]] = {
    "single_object": (len(CLASSES), _single),
    "two_object": (len(CLASSES) * (len(CLASSES) - 1), _two),
    "counting": (len(CLASSES) * len(NUMBERS), _counting),
    "colors": (len(COLORED) * len(COLORS), _colors),
    "position": (len(CLASSES) * (len(CLASSES) - 1) * len(RELATIONS), _position),
    "color_attr": (len(COLORED) * (len(COLORED) - 1) * len(COLORS) * (len(COLORS) - 1), _color_attr),
}
"""Each task's number of prompts, and the function that makes a prompt from its index."""


def _pair(index: int, things: tuple[str, ...]) -> tuple[str, str]:
    """Return the ordered pair of different things with this index."""
    first, second = divmod(index, len(things) - 1)
    return things[first], things[second + (second >= first)]


def _object(label: str, **more: Any) -> dict[str, Any]:
    return {"class": label, "count": 1, **more}


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _line(tag: str, include: list[dict[str, Any]], what: str) -> Line:
    return {"tag": tag, "include": include, "prompt": f"a photo of {what}"}
