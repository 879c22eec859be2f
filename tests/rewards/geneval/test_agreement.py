"""Thousands of generated detections: `compat: original` equals the original's formulas, and where the default differs.

The oracle follows the two codes' rules step by step: GenEval's official verdict (arXiv 2310.11513) and the reward
server of Flow-GRPO (arXiv 2505.05470). It shares nothing with ours but the data types.
"""

import math
import random
from typing import Any

import pytest

from protocol.messages import Detection
from rewards.geneval.clauses import TAGS, read_clauses
from rewards.geneval.original import judge_original
from rewards.geneval.verdict import judge

CASES = 500
"""Of each kind of prompt: 3,000 in all."""
LABELS, COLOURS, RELATIONS = ("cat", "dog", "cow"), ("red", "blue", "green"), ("left of", "right of", "above", "below")


def prompt(kind: str, rng: random.Random) -> dict[str, Any]:
    first, second = rng.sample(LABELS[:2], 2)
    one, other = {"class": first, "count": 1}, {"class": second, "count": 1}
    if kind == "single_object":
        return {"tag": kind, "include": [one]}
    if kind == "two_object":
        return {"tag": kind, "include": [one, other]}
    if kind == "counting":
        count = rng.randint(2, 4)
        exclude = [{"class": first, "count": count + 1}]
        return {"tag": kind, "include": [one | {"count": count}], "exclude": exclude}
    if kind == "colors":
        return {"tag": kind, "include": [one | {"color": rng.choice(COLOURS)}]}
    if kind == "position":
        return {"tag": kind, "include": [one, other | {"position": [rng.choice(RELATIONS), 0]}]}
    colours = rng.sample(COLOURS, 2)
    return {"tag": kind, "include": [one | {"color": colours[0]}, other | {"color": colours[1]}]}


def detections(rng: random.Random) -> list[Detection]:
    """Mostly about as many as asked for, sometimes more than a class may count (16); scores all differ."""
    found = []
    for label in LABELS:
        most = 20 if rng.random() < 0.05 else 5
        count = rng.choices(range(most + 1), weights=[3, 8, 4, 3, *[2] * (most - 3)])[0]
        for _ in range(count):
            x, y = rng.uniform(0, 400), rng.uniform(0, 400)
            box = (x, y, x + rng.uniform(1, 112), y + rng.uniform(1, 112))
            found.append(Detection(label=label, color=rng.choice(COLOURS), box=box, score=rng.random()))
    rng.shuffle(found)
    return found


def relations_of(a: Detection, b: Detection) -> set[str]:
    centres = [((each.box[0] + each.box[2]) / 2, (each.box[1] + each.box[3]) / 2) for each in (a, b)]
    dx, dy = (centres[0][axis] - centres[1][axis] for axis in (0, 1))
    width = a.box[2] - a.box[0] + b.box[2] - b.box[0]
    height = a.box[3] - a.box[1] + b.box[3] - b.box[1]
    x = math.copysign(max(abs(dx) - 0.1 * width, 0), dx)
    y = math.copysign(max(abs(dy) - 0.1 * height, 0), dy)
    if abs(x) < 1e-3 and abs(y) < 1e-3:
        return set()
    length = math.hypot(dx, dy)
    names = {"left of": -x, "right of": x, "above": -y, "below": y}
    return {name for name, amount in names.items() if amount / length > 0.5}


def oracle(found: list[Detection], line: dict[str, Any]) -> tuple[float, bool, bool]:
    """The reward server's mean of terms and its strict verdict, and GenEval's official one."""
    of_class = {
        label: sorted((each for each in found if each.label == label), key=lambda each: each.score, reverse=True)[:16]
        for label in LABELS
    }
    terms: list[float] = []
    verdicts = []
    for is_official in (False, True):
        right, groups = True, []
        for item in line["include"]:
            wanted, objects = item["count"], of_class[item["class"]]
            matched = True
            if is_official:
                objects = objects[:wanted]
            else:
                terms.append(1 - abs(wanted - len(objects)) / wanted)
            if len(objects) < wanted if is_official else len(objects) != wanted:
                matched = False
                if not is_official and ("color" in item or "position" in item):
                    terms.append(0.0)
            else:
                if "color" in item:
                    coloured = [each.color for each in objects].count(item["color"])
                    if not is_official:
                        terms.append(1 - abs(wanted - coloured) / wanted)
                    matched = coloured >= wanted if is_official else coloured == wanted
                if "position" in item and matched:
                    relation, number = item["position"]
                    if groups[number] is None:
                        matched = False
                        terms += [] if is_official else [0.0]
                    else:
                        matched = all(relation in relations_of(a, b) for a in objects for b in groups[number])
                        terms += [] if is_official else [1.0] if matched else [0.0, 1.0]
            groups.append(objects if matched else None)
            right = right and matched
        if is_official:
            for item in line.get("exclude", []):
                right = right and len(of_class[item["class"]]) < item["count"]
        verdicts.append(right)
    return sum(terms) / len(terms), verdicts[0], verdicts[1]


def explanation(found: list[Detection], line: dict[str, Any]) -> str | None:
    """Why the default's soft score may differ from the original's, by its documented rules; None if it may not."""
    counts = {item["class"]: sum(each.label == item["class"] for each in found) for item in line["include"]}
    if any(counts[item["class"]] > 2 * item["count"] for item in line["include"]):
        return "more than twice as many: the original goes below 0"
    is_exact = all(counts[item["class"]] == item["count"] for item in line["include"])
    if line["tag"] in ("colors", "color_attr") and not is_exact:
        return "a wrong count: the original does not look at colours"
    if line["tag"] == "position":
        return "a wrong relation: the original adds 0 and 1" if is_exact else "a wrong count: the original adds one 0"
    return None


@pytest.mark.parametrize("kind", TAGS)
def test_both_readings_on_generated_detections(kind: str) -> None:
    rng = random.Random(kind)
    seen, rights, reasons = 0, 0, set()
    for _ in range(CASES):
        line, found = prompt(kind, rng), detections(rng)
        soft, strict, correct = oracle(found, line)
        original, ours = (reading(found, read_clauses(line)) for reading in (judge_original, judge))
        assert original.soft == pytest.approx(soft, abs=1e-12), (line, found)
        assert (original.strict, original.correct) == (strict, correct), (line, found)
        assert (ours.strict, ours.correct) == (strict, correct), "both verdicts are the original's on GenEval's prompts"
        assert 0 <= ours.soft <= 1
        if ours.soft != pytest.approx(soft, abs=1e-12):
            reason = explanation(found, line)
            assert reason, (line, found)
            reasons.add(reason)
        seen += 1
        rights += correct
    assert CASES // 50 < rights < seen - CASES // 50, "the cases are neither all right nor all wrong"
    expected = 3 if kind == "position" else 2 if kind in ("colors", "color_attr") else 1
    assert len(reasons) == expected, reasons
