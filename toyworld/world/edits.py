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
SIDES = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
"""Where an added shape is, and how an instruction says it."""

TRAIN_PHRASES = {
    "color": (
        "make the {label} {color}",
        "paint the {label} {color}",
        "color the {label} {color}",
        "dye the {label} {color}",
    ),
    "remove": ("remove the {label}", "delete the {label}", "erase the {label}", "take the {label} away"),
    "add": ("add a {color} {label} {side}", "put a {color} {label} {side}", "draw a {color} {label} {side}"),
    "replace": ("replace the {label} by a {to}", "change the {label} into a {to}", "swap the {label} for a {to}"),
}
HELDOUT_PHRASES = {
    "color": (
        "turn the {label} {color}",
        "tint the {label} {color}",
        "let the {label} be {color}",
        "give the {label} a {color} color",
    ),
    "remove": ("drop the {label}", "wipe the {label} out", "clear the {label}", "get rid of the {label}"),
    "add": ("place a {color} {label} {side}", "insert a {color} {label} {side}", "set a {color} {label} {side}"),
    "replace": ("turn the {label} into a {to}", "make the {label} a {to}", "exchange the {label} for a {to}"),
}

SEED = 17
PER_KIND = {"train": 36, "heldout": 12}
"""Lines of each kind in a file."""
MOST_SHAPES = len(SHAPES)
"""The shapes of a scene differ in class, so the class names a shape."""
CLEAR = 1.5
"""Pixels by which the middle of an added shape is nearer to its side than to any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What an instruction asks for; the metadata of a line holds the same fields."""

    kind: str
    """One of `KINDS`."""
    label: str
    """Class of the shape that is changed, removed or added."""
    color: str | None = None
    """Its new colour (`color`), or that of an added shape."""
    side: str | None = None
    """Where a shape is added, one of `SIDES`."""
    to: str | None = None
    """The class that replaces it."""

    def metadata(self) -> dict[str, str]:
        """Return the fields that are set; `tag` is the kind and `class` the label."""
        given = {"tag": self.kind, "class": self.label, "color": self.color, "side": self.side, "to": self.to}
        return {name: value for name, value in given.items() if value}

    @classmethod
    def of(cls, metadata: Metadata) -> "Edit":
        """Read the edit of a line's metadata.

        Raises:
            PromptError: the metadata are those of no edit.
        """
        given: dict[str, Any] = {name: metadata.get(name) for name in ("tag", "class", "color", "side", "to")}
        read = cls(kind=given["tag"], label=given["class"], color=given["color"], side=given["side"], to=given["to"])
        if read.kind not in KINDS or read not in facts(read.kind):
            raise PromptError(f"the metadata of an edit must be one of the toy world's, got {given}")
        return read

    def instruction(self, phrase: str) -> str:
        return phrase.format(label=self.label, color=self.color, side=SIDES.get(self.side or ""), to=self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An edit with the scene before it and the scene that it asks for."""

    edit: Edit
    before: Scene
    wanted: Scene


def facts(kind: str) -> list[Edit]:
    """Return every edit of a kind."""
    if kind == "color":
        return [Edit(kind=kind, label=label, color=color) for label, color in product(SHAPES, COLOURS)]
    if kind == "remove":
        return [Edit(kind=kind, label=label) for label in SHAPES]
    if kind == "add":
        places = product(SHAPES, COLOURS, SIDES)
        return [Edit(kind=kind, label=label, color=color, side=side) for label, color, side in places]
    return [Edit(kind=kind, label=label, to=to) for label, to in permutations(SHAPES, 2)]


def is_heldout(edit: Edit) -> bool:
    """Tell whether an edit belongs to the held-out file; False for kinds that are split by phrase and image alone."""
    if edit.kind not in ("color", "add"):
        return False
    label, color = SHAPES.index(edit.label), COLOURS.index(edit.color or "")
    side = list(SIDES).index(edit.side) if edit.side else 0
    return (label + color + side) % len(COLOURS) == 1


def side_of(center: tuple[float, float]) -> str:
    """Return the side of an image that a point (x, y) is on: the one of its larger offset from the middle."""
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
    labels = [edit.label, *others[: int(rng.integers(1, MOST_SHAPES))]]
    scene = sample_scene({"include": [{"class": label, "count": 1} for label in labels]}, rng)
    if edit.kind == "add":
        added = replace(scene.shapes[0], color=str(edit.color), rgb=PALETTE[str(edit.color)])
        wanted = Scene(shapes=(added, *scene.shapes[1:]))
        before = Scene(shapes=scene.shapes[1:])
        return Example(edit=edit, before=before, wanted=wanted) if _is_on_side(added, str(edit.side)) else None
    if edit.kind == "color" and scene.shapes[0].color == edit.color:
        return None
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
        by_fact = any(is_heldout(edit) for edit in facts(kind))
        allowed = [edit for edit in facts(kind) if not by_fact or is_heldout(edit) == (split == "heldout")]
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
