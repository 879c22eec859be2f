"""The scorer of the toy world's edits: was the instruction followed, and what else changed?

    rewards: {edit: {scorer: "toyworld.world.edit_scorer:ShapesEdit"}}

It reads the instruction from the metadata, and the shapes before and after with `ShapeDetector`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from protocol.errors import PromptError
from protocol.messages import Detection, Metadata, Prompt, Scores
from protocol.prompts import check_each
from toyworld.world.detector import ShapeDetector, nearest_colour
from toyworld.world.edits import Edit, side_of

NEAR = 2.5
"""Most pixels between the middles of a shape before and after, if it has not moved."""
AROUND = 2
"""Pixels around the edited shape that may change with it."""


class EditVerdict(NamedTuple):
    """What became of one instruction; every number is in [0, 1]."""

    followed: float
    """Share of what the instruction asks for."""
    over_edit: float
    """Share of all other coloured pixels, before or after, that have another colour now."""
    exact: float
    """1 if the image shows exactly the shapes that the instruction asks for, each near its old position."""


class ShapesEdit:
    """Scores edits of the toy world, in [0, 1]: followed (1 - over_edit). See `judge` for the formulas.

    The components are the fields of `EditVerdict`. An image has no score if its condition image has another size or
    does not show the shape to edit.
    """

    name = "shapes_edit"
    low = 0.0
    high = 1.0
    components = EditVerdict._fields

    def __init__(self) -> None:
        self._detector = ShapeDetector()

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that every prompt has one image and the metadata of an edit.

        Raises:
            PromptError: one has not; the error names its line.
        """
        check_each(prompts, _check)

    def score(
        self,
        images: UInt8[np.ndarray, "B H W 3"],
        prompts: Sequence[str],  # noqa: ARG002
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[UInt8[np.ndarray, "H W 3"]]],
    ) -> Scores:
        seen: dict[int, list[Detection]] = {}  # the images of a group share theirs
        verdicts, reasons = [], []
        detected = self._detector.detect(images)
        for image, line, (before, *_), shapes_after in zip(images, metadata, conditions, detected, strict=True):
            if id(before) not in seen:
                (seen[id(before)],) = self._detector.detect(before[None])
            verdict = judge(Edit.of(line), before, image, shapes_before=seen[id(before)], shapes_after=shapes_after)
            verdicts.append(verdict or EditVerdict(np.nan, np.nan, np.nan))
            reasons.append("" if verdict else "the condition image must show the shape to edit at the image's size")
        table = np.array(verdicts, np.float32).reshape(-1, len(EditVerdict._fields))
        return Scores(
            values=table[:, 0] * (1 - table[:, 1]),
            valid=np.isfinite(table[:, 0]),
            reasons=tuple(reasons),
            components=dict(zip(EditVerdict._fields, table.T.copy(), strict=True)),
        )


def judge(
    edit: Edit,
    before: UInt8[np.ndarray, "H W 3"],
    after: UInt8[np.ndarray, "H W 3"],
    *,
    shapes_before: Sequence[Detection],
    shapes_after: Sequence[Detection],
) -> EditVerdict | None:
    """Judge one edited image.

    The edited shape has the class and the colour that the instruction names; what replaces it is near its old
    position. `followed` is

        color     1 if it has the wanted colour, half of it if it has another class now
        replace   1 if it has the wanted class, half of it if it has another colour now
        remove    the share of its pixels that are ground now
        add       the share of class, colour and side that are right, of the best shape that was not there

    A pixel counts as the palette colour nearest to it. Pixels may change in the boxes of the edited shape and of its
    replacement, and `AROUND` pixels beyond, but not if they belong to another shape.

    Args:
        edit: what the instruction asks for.
        before: the condition image.
        after: the edited image.
        shapes_before: the shapes of the condition image.
        shapes_after: the shapes of the edited image.

    Returns:
        The verdict; None if the condition image does not show the shape, or has another size.
    """
    subject = next((shape for shape in shapes_before if (shape.label, shape.color) == (edit.label, edit.was)), None)
    if before.shape != after.shape or (subject is None) != (edit.kind == "add"):
        return None
    was, now = nearest_colour(np.stack([before, after]).astype(np.float32))
    others = [shape for shape in shapes_before if shape is not subject]
    new = [shape for shape in shapes_after if not any(_is_same(shape, other) for other in others)]
    if subject is not None:
        new = [shape for shape in new if _is_near(shape, subject)]
    made = max(new, key=lambda shape: _facts_right(edit, shape, subject), default=None)
    edited = _inside(subject, was.shape) & (was >= 0)
    if edit.kind == "remove":
        followed = float((now[edited] < 0).mean())
    else:
        followed = _facts_right(edit, made, subject) if made else 0.0
    counts = ~(_inside(subject, was.shape, AROUND) | _inside(made, was.shape, AROUND)) | ((was >= 0) & ~edited)
    coloured = counts & ((was >= 0) | (now >= 0))
    over_edit = float((was != now)[coloured].mean()) if coloured.any() else 0.0
    is_exact = (
        followed == 1.0
        and len(shapes_after) == len(others) + (edit.kind != "remove")
        and all(any(_is_same(shape, other) for shape in shapes_after) for other in others)
    )
    return EditVerdict(followed, over_edit, float(is_exact))


def _facts_right(edit: Edit, shape: Detection, subject: Detection | None) -> float:
    if subject is None:
        right = (shape.label == edit.label, shape.color == edit.color, side_of(_middle(shape)) == edit.side)
        return sum(right) / len(right)
    if edit.kind == "color":
        return (shape.color == edit.color) * (1 + (shape.label == subject.label)) / 2
    return (shape.label == edit.to) * (1 + (shape.color == subject.color)) / 2


def _inside(shape: Detection | None, size: tuple[int, ...], around: int = 0) -> Bool[np.ndarray, "H W"]:
    """Return which pixels lie in a shape's box, with some pixels around it; none without a shape."""
    mask = np.zeros(size, bool)
    if shape is not None:
        x0, y0, x1, y1 = shape.box
        rows = slice(max(int(y0) - around, 0), int(np.ceil(y1)) + around)
        mask[rows, max(int(x0) - around, 0) : int(np.ceil(x1)) + around] = True
    return mask


def _is_same(shape: Detection, other: Detection) -> bool:
    return (shape.label, shape.color) == (other.label, other.color) and _is_near(shape, other)


def _is_near(shape: Detection, other: Detection) -> bool:
    return float(np.hypot(*np.subtract(_middle(shape), _middle(other)))) <= NEAR


def _middle(shape: Detection) -> tuple[float, float]:
    x0, y0, x1, y1 = shape.box
    return (x0 + x1) / 2, (y0 + y1) / 2


def _check(prompt: Prompt) -> None:
    Edit.of(prompt.metadata)
    if len(prompt.conditions) != 1:
        raise PromptError(f"an edit must have one image, got {len(prompt.conditions)}")
