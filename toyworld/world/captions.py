"""Captions: GenEval metadata lines of the toy world, and the same lines with one wrong fact.

`draw_line(rng)` returns a random line; `with_one_fact_wrong(line, rng)` returns it with one fact changed.
"""

from typing import Any

import numpy as np

from toyworld.world.vocabulary import COLOURS, NUMBERS, OPPOSITE, PHRASES, RELATIONS, SHAPES, TAGS, plural

Line = dict[str, Any]
"""A GenEval metadata line: `tag`, `include`, optionally `exclude`, and `prompt`."""


def make_line(tag: str, include: list[dict[str, Any]], phrase: str) -> Line:
    """Make a metadata line; its `prompt` is the phrase followed by a description of the objects.

    Args:
        tag: GenEval's task kind.
        include: the objects that the image must show.
        phrase: the start of the prompt, such as "a photo of".

    Returns:
        The line; a counting line also excludes one object more.
    """
    line: Line = {"tag": tag, "include": include}
    if tag == "counting":
        line["exclude"] = [{"class": include[0]["class"], "count": include[0]["count"] + 1}]
    line["prompt"] = f"{phrase} {describe(include)}"
    return line


def describe(include: list[dict[str, Any]]) -> str:
    """Describe an `include` list in GenEval's word order: of two related objects the placed one comes first."""
    names = [_name(item) for item in include]
    if "position" in include[-1]:
        return f"{names[1]} {include[-1]['position'][0]} {names[0]}"
    return " and ".join(names)


def draw_line(rng: np.random.Generator, tag: str | None = None) -> Line:
    """Draw a random line; tag, facts and phrase are each uniform over the vocabulary."""
    tag = tag or str(rng.choice(TAGS))
    first, second = (str(name) for name in rng.permutation(SHAPES)[:2])
    colours = [str(name) for name in rng.permutation(COLOURS)[:2]]
    include: list[dict[str, Any]] = [{"class": first, "count": 1}]
    if tag == "counting":
        include[0]["count"] = int(rng.choice(list(NUMBERS)))
    if tag in ("colors", "color_attr"):
        include[0]["color"] = colours[0]
    if tag in ("two_object", "position", "color_attr"):
        include.append({"class": second, "count": 1})
    if tag == "color_attr":
        include[1]["color"] = colours[1]
    if tag == "position":
        include[1]["position"] = [str(rng.choice(RELATIONS)), 0]
    return make_line(tag, include, str(rng.choice(PHRASES)))


def with_one_fact_wrong(line: Line, rng: np.random.Generator) -> Line:
    """Return the line with one fact changed, so that no image satisfies both lines.

    A count changes by one, a relation becomes its opposite or a perpendicular one, and the two colours of `color_attr`
    swap or one of them changes. In all other lines, and in a quarter of these, a shape becomes one that the line does
    not name.
    """
    include = [dict(item) for item in line["include"]]
    tag = line["tag"]
    if tag in ("single_object", "two_object") or rng.random() < 0.25:
        item = include[int(rng.integers(len(include)))]
        item["class"] = str(rng.choice([shape for shape in SHAPES if shape not in {i["class"] for i in include}]))
    elif tag == "counting":
        include[0]["count"] = {2: 3, 3: int(rng.choice([2, 4])), 4: 3}[include[0]["count"]]
    elif tag == "position":
        relation = include[1]["position"][0]
        others = [name for name in RELATIONS if name != relation]
        include[1]["position"] = [OPPOSITE[relation] if rng.random() < 0.5 else str(rng.choice(others)), 0]
    elif tag == "color_attr" and rng.random() < 0.5:
        include[0]["color"], include[1]["color"] = include[1]["color"], include[0]["color"]
    else:
        item = include[int(rng.integers(len(include)))]
        used = {i["color"] for i in include}
        item["color"] = str(rng.choice([colour for colour in COLOURS if colour not in used]))
    phrase = line["prompt"].removesuffix(describe(line["include"])).strip()
    return make_line(tag, include, phrase)


def _name(item: dict[str, Any]) -> str:
    """Return one included object in words: number or article, colour if given, class."""
    number = NUMBERS.get(item["count"], "a")
    shape = item["class"] if item["count"] == 1 else plural(item["class"])
    return " ".join(filter(None, [number, item.get("color"), shape]))
