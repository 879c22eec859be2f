"""Edits: an instruction, the scene before it, and the scene that it asks for.

`draw_edit(rng)` draws one; `python -m toyworld.world.edits` writes the prompt files and their images.
"""

import json
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import numpy as np
import typer
from rich.console import Console

from protocol.errors import PromptError
from protocol.messages import Metadata
from toyworld.world.prompts import FOLDER
from toyworld.world.scenes import SIZE, Scene, Shape, fits, render, sample_scene
from toyworld.world.vocabulary import COLOURS, PALETTE, SHAPES

KINDS = ("color", "remove", "add", "replace")
KEYS = {"tag": "kind", "class": "label", "was": "was", "color": "color", "side": "side", "to": "to"}
"""The fields of an edit by their keys in the metadata of a line."""
SIDES = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
"""Where an added shape is, and how an instruction says it."""

TRAIN_PHRASES = {
    "color": (
        "make the {was} {label} {color}",
        "paint the {was} {label} {color}",
        "color the {was} {label} {color}",
        "dye the {was} {label} {color}",
    ),
    "remove": (
        "remove the {was} {label}",
        "delete the {was} {label}",
        "erase the {was} {label}",
        "take the {was} {label} away",
    ),
    "add": ("add a {color} {label} {side}", "put a {color} {label} {side}", "draw a {color} {label} {side}"),
    "replace": (
        "replace the {was} {label} by a {to}",
        "change the {was} {label} into a {to}",
        "swap the {was} {label} for a {to}",
    ),
}
HELDOUT_PHRASES = {
    "color": (
        "turn the {was} {label} {color}",
        "tint the {was} {label} {color}",
        "let the {was} {label} be {color}",
        "give the {was} {label} a {color} color",
    ),
    "remove": (
        "drop the {was} {label}",
        "wipe the {was} {label} out",
        "clear the {was} {label}",
        "get rid of the {was} {label}",
    ),
    "add": ("place a {color} {label} {side}", "insert a {color} {label} {side}", "set a {color} {label} {side}"),
    "replace": (
        "turn the {was} {label} into a {to}",
        "make the {was} {label} a {to}",
        "exchange the {was} {label} for a {to}",
    ),
}

SEED = 17
PER_KIND = {"train": 36, "heldout": 12}
"""Lines of each kind in a file."""
MOST_SHAPES = len(SHAPES)
"""The shapes of a scene differ in class."""
CLEAR = 1.5
"""Pixels by which the middle of an added shape is nearer to its side than to any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What an instruction asks for; the metadata of a line holds the same fields."""

    kind: str
    """One of `KINDS`."""
    label: str
    """Class of the shape that is changed, removed or added."""
    was: str | None = None
    """Its colour before; None if it is added."""
    color: str | None = None
    """Its new colour (`color`), or the added shape's colour."""
    side: str | None = None
    """Where a shape is added, one of `SIDES`."""
    to: str | None = None
    """The class that replaces it."""

    def metadata(self) -> dict[str, str]:
        """Return the fields that are set; `tag` is the kind and `class` the label."""
        return {key: value for key, name in KEYS.items() if (value := getattr(self, name))}

    @classmethod
    def of(cls, metadata: Metadata) -> "Edit":
        """Read the edit of a line's metadata.

        Raises:
            PromptError: the metadata name no edit.
        """
        given: dict[str, Any] = {key: metadata.get(key) for key in KEYS}
        read = cls(**{name: given[key] for key, name in KEYS.items()})
        if read.kind not in KINDS or read not in facts(read.kind):
            raise PromptError(f"the metadata of an edit must be one of the toy world's, got {given}")
        return read

    def instruction(self, phrase: str) -> str:
        side = SIDES.get(self.side or "")
        return phrase.format(label=self.label, was=self.was, color=self.color, side=side, to=self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An edit with the scene before it and the scene that it asks for."""

    edit: Edit
    before: Scene
    wanted: Scene


def facts(kind: str) -> list[Edit]:
    """Return every edit of a kind."""
    if kind == "color":
        changes = product(SHAPES, permutations(COLOURS, 2))
        return [Edit(kind=kind, label=label, was=was, color=color) for label, (was, color) in changes]
    if kind == "remove":
        return [Edit(kind=kind, label=label, was=was) for label, was in product(SHAPES, COLOURS)]
    if kind == "add":
        additions = product(SHAPES, COLOURS, SIDES)
        return [Edit(kind=kind, label=label, color=color, side=side) for label, color, side in additions]
    swaps = product(permutations(SHAPES, 2), COLOURS)
    return [Edit(kind=kind, label=label, was=was, to=to) for (label, to), was in swaps]


def is_heldout(edit: Edit) -> bool:
    """Tell whether an edit belongs to the held-out file: one in four of each kind does."""
    named = ((SHAPES, edit.label), (COLOURS, edit.was), (COLOURS, edit.color), (tuple(SIDES), edit.side))
    return sum(names.index(name) for names, name in named if name) % len(COLOURS) == 1


def side_of(center: tuple[float, float]) -> str:
    """Return the side of an image that a point (x, y) is on, by its larger offset from the middle."""
    x, y = center[0] - SIZE / 2, center[1] - SIZE / 2
    if abs(x) > abs(y):
        return "left" if x < 0 else "right"
    return "top" if y < 0 else "bottom"


def draw_example(edit: Edit, rng: np.random.Generator) -> Example:
    """Draw a scene that the edit can be made in; its shapes differ in class, and all but the edited one stay."""
    while True:
        example = _try(edit, rng)
        if example and fits(example.before) and fits(example.wanted):
            return example


def draw_edit(rng: np.random.Generator, kind: str | None = None) -> Edit:
    """Draw an edit; its kind and facts are uniform."""
    kind = kind or str(rng.choice(KINDS))
    every = facts(kind)
    return every[int(rng.integers(len(every)))]


def applied(edit: Edit, scene: Scene) -> Scene:
    """Return the scene after an edit of one of its shapes."""
    changed = []
    for shape in scene.shapes:
        if shape.label != edit.label:
            changed.append(shape)
        elif edit.kind == "color":
            changed.append(replace(shape, color=str(edit.color), rgb=PALETTE[str(edit.color)]))
        elif edit.kind == "replace":
            changed.append(replace(shape, label=str(edit.to)))
    return Scene(shapes=tuple(changed))


def _try(edit: Edit, rng: np.random.Generator) -> Example | None:
    others = [str(label) for label in rng.permutation(SHAPES) if label not in (edit.label, edit.to)]
    edited = {"class": edit.label, "count": 1, "color": edit.was or edit.color}
    scene = sample_scene(
        {"include": [edited, *({"class": label, "count": 1} for label in others[: int(rng.integers(1, MOST_SHAPES))])]},
        rng,
    )
    if edit.kind == "add":
        before = Scene(shapes=scene.shapes[1:])
        is_there = _is_on_side(scene.shapes[0], str(edit.side))
        return Example(edit=edit, before=before, wanted=scene) if is_there else None
    return Example(edit=edit, before=scene, wanted=applied(edit, scene))


def _is_on_side(shape: Shape, side: str) -> bool:
    x, y = shape.center[0] - SIZE / 2, shape.center[1] - SIZE / 2
    return side_of(shape.center) == side and abs(abs(x) - abs(y)) > CLEAR


def lines(split: str) -> list[tuple[dict[str, Any], Example]]:
    """Return the lines of one file, "train" or "heldout", each with its example; two lines never share an image."""
    rng = np.random.default_rng([SEED, list(PER_KIND).index(split)])
    phrases = HELDOUT_PHRASES if split == "heldout" else TRAIN_PHRASES
    found = []
    for kind in KINDS:
        allowed = [edit for edit in facts(kind) if is_heldout(edit) == (split == "heldout")]
        order = rng.permutation(len(allowed))
        for turn in range(PER_KIND[split]):
            round_, index = divmod(turn, len(order))
            edit, phrase = allowed[order[index]], phrases[kind][(index + round_) % len(phrases[kind])]
            name = f"edit_images/{split}_{len(found):03d}"
            line = {**edit.metadata(), "image": f"{name}.png", "prompt": edit.instruction(phrase)}
            if split == "heldout":
                line["wanted_image"] = f"{name}_wanted.png"
            found.append((line, draw_example(edit, rng)))
    return found


def words() -> list[str]:
    """Return every word that an instruction can hold, each once, in a fixed order."""
    phrases = [phrase for every in (TRAIN_PHRASES, HELDOUT_PHRASES) for kind in KINDS for phrase in every[kind]]
    plain = [word for phrase in (*phrases, *SIDES.values()) for word in phrase.split() if "{" not in word]
    return list(dict.fromkeys([*SHAPES, *COLOURS, *plain]))


def main() -> None:
    """Write `edit_train.jsonl` and `edit_heldout.jsonl`, and their images, into the repository."""
    from PIL import Image

    (FOLDER / "edit_images").mkdir(exist_ok=True)
    for split in PER_KIND:
        made = lines(split)
        for line, example in made:
            for key, scene in (("image", example.before), ("wanted_image", example.wanted)):
                if key in line:
                    Image.fromarray(render(scene)).save(FOLDER / line[key], optimize=True)
        path = FOLDER / f"edit_{split}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line, _ in made))
        Console().print(f"{path.name}: {len(made)} lines")


if __name__ == "__main__":
    typer.run(main)
