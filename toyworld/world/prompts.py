"""The prompt files: GenEval metadata lines for training and for evaluation, disjoint in facts or in phrases.

`python -m toyworld.world.prompts` writes `train.jsonl` and `heldout.jsonl` of `toyworld/prompts/`.
"""

import json
from collections.abc import Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from toyworld.world.captions import Line, make_line
from toyworld.world.vocabulary import (
    COLOURS,
    HELDOUT_PHRASES,
    NUMBERS,
    OPPOSITE,
    RELATIONS,
    SHAPES,
    TAGS,
    TRAIN_PHRASES,
)

FOLDER = Path(__file__).parents[1] / "prompts"
SEED = 11
PER_KIND = {"train": 48, "heldout": 24}
"""Most lines of one task kind in a file; single_object and two_object have only 24 different texts for each file."""

Include = list[dict[str, Any]]


def facts(tag: str) -> list[Include]:
    """Return every `include` list of a task kind."""
    pairs = list(permutations(SHAPES, 2))
    if tag == "single_object":
        return [[_item(shape)] for shape in SHAPES]
    if tag == "two_object":
        return [[_item(a), _item(b)] for a, b in pairs]
    if tag == "counting":
        return [[{"class": shape, "count": number}] for shape, number in product(SHAPES, NUMBERS)]
    if tag == "colors":
        return [[_item(shape, color=colour)] for shape, colour in product(SHAPES, COLOURS)]
    if tag == "position":
        return [[_item(b), _item(a, position=[relation, 0])] for (a, b), relation in product(pairs, RELATIONS)]
    colours = list(permutations(COLOURS, 2))
    return [[_item(a, color=c), _item(b, color=d)] for (a, b), (c, d) in product(pairs, colours)]


def is_heldout(tag: str, include: Include) -> bool:
    """Tell whether an `include` list belongs to the held-out file; False for task kinds that are split by phrase alone.

    Two lists of the same meaning ("a left of b", "b right of a") always belong to the same file. The exception is
    two_object: three shapes form only three pairs, so one order of each pair is held out.
    """
    shapes = [SHAPES.index(item["class"]) for item in include]
    if tag == "two_object":
        return (shapes[1] - shapes[0]) % 3 == 2
    if tag == "colors":
        return COLOURS.index(include[0]["color"]) == (shapes[0] + 1) % len(COLOURS)
    if tag == "position":
        relation = include[1]["position"][0]
        placed, other = shapes[1], shapes[0]
        if placed > other:
            relation, placed, other = OPPOSITE[relation], other, placed
        return RELATIONS.index(relation) == placed + other - 1
    if tag == "color_attr":
        colours = [COLOURS.index(item["color"]) for item in include]
        low, high = colours if shapes[0] < shapes[1] else colours[::-1]
        return (low - high) % len(COLOURS) == 1 + (sum(shapes) % 3)
    return False


def lines(split: str) -> list[Line]:
    """Return the lines of one file, "train" or "heldout": task kinds in GenEval's order, each text once."""
    rng = np.random.default_rng(SEED)
    return [line for tag in TAGS for line in _lines_of_kind(tag, split, rng)]


def _lines_of_kind(tag: str, split: str, rng: np.random.Generator) -> list[Line]:
    """Return distinct lines in which all allowed `include` lists, and all phrases, occur about equally often."""
    by_phrase = not any(is_heldout(tag, include) for include in facts(tag))
    allowed = [include for include in facts(tag) if by_phrase or is_heldout(tag, include) == (split == "heldout")]
    phrases: Sequence[str] = HELDOUT_PHRASES if split == "heldout" else TRAIN_PHRASES
    wanted = min(PER_KIND[split], len(allowed) * len(phrases))
    order = rng.permutation(len(allowed))
    start = rng.integers(len(phrases), size=len(allowed))
    picks = [(order[turn % len(allowed)], turn // len(allowed)) for turn in range(wanted)]
    return [make_line(tag, allowed[i], phrases[(start[i] + turn) % len(phrases)]) for i, turn in picks]


def _item(shape: str, **more: Any) -> dict[str, Any]:
    return {"class": shape, "count": 1, **more}


def main() -> None:
    """Write the prompt files into the repository and print how many lines each has."""
    for split in PER_KIND:
        made = lines(split)
        (FOLDER / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
        Console().print(f"{FOLDER.name}/{split}.jsonl: {len(made)} lines")


if __name__ == "__main__":
    typer.run(main)
