"""Images for people: the gallery of an evaluation, and a comparison of two evaluations at the same seeds."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat, starmap
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deploy.folder.heldout import HeldoutScores, read_heldout
from deploy.folder.paired import change_text, score_of
from learner.loop.evaluate import Evaluation
from protocol.errors import one_line
from protocol.ground.condition_images import read_condition
from protocol.ground.files import iteration_name, write_whole
from protocol.messages import ConditionImage, Prompt

PASS, FAIL = "#2e7d32", "#c62828"
BESIDE = ("conditions", "wanted")
"""Names of the arrays of further images in a gallery's file."""
COLUMNS, MANY = 4, 16
"""Prompts in a row of a grid; a grid of more than `MANY` has twice as many, so that it stays one sheet."""
DPI, LARGEST = 130, 280
"""Dots per inch of a grid: the usual number, and the highest, for large images."""
IMAGE, SPACE, GAP, LINE = 1.1, 0.5, 0.1, 0.14
"""In inches: an image's width, what a prompt takes besides its images, a small distance, and the height of a line."""
MOST_LINES = 6
"""Most lines of a prompt, and of the title."""


class GalleryImage(NamedTuple):
    """One image of an evaluation, and what is shown beside it; images are uint8 [H, W, 3] of one size."""

    image: np.ndarray
    reading: float
    """Mean score of all images of its prompt; NaN if none has one."""
    condition: np.ndarray | None = None
    """The image that its prompt edits, the first of several; None if no prompt has one."""
    wanted: np.ndarray | None = None
    """The image that its prompt asks for; None if no prompt names one."""


def write_gallery(gallery: Path, iteration: int, evaluation: Evaluation) -> None:
    """Write `iteration_NNNNNN.png`, and `.npz` with the same images, prompts and readings.

    Args:
        evaluation: the evaluation; its gallery holds images uint8 [H, W, 3] and the scores of their prompts.
    """
    prompts = distinct([prompt.text for prompt, _, _ in evaluation.gallery])
    kept = gallery_images(evaluation.gallery)
    images, readings, *beside = zip(*kept, strict=True)
    given: dict[str, Any] = {
        name: np.stack(each) for name, each in zip(BESIDE, beside, strict=True) if each[0] is not None
    }
    arrays = io.BytesIO()
    np.savez(
        arrays, prompts=np.array(prompts), images=np.stack(images), readings=np.array(readings, np.float32), **given
    )
    write_whole(gallery / iteration_name(iteration, ".npz"), arrays.getvalue())
    cells = [cell_of(prompt, each) for prompt, each in zip(prompts, kept, strict=True)]
    title = f"held-out prompts at iteration {iteration}: score {evaluation.score:.3f}{beside_text(kept)}"
    write_grid(gallery / iteration_name(iteration, ".png"), cells, title)


def write_before_after(gallery: Path, *, first: int, last: int, diversity: str | None = None) -> Path:
    """Write `before_after.png`: the images of two evaluations side by side, each pair from the same noise.

    The pairs go from the largest rise of the score to the largest fall. The title says what all images score.

    Args:
        gallery: the folder that holds both galleries.
        first: iteration of the earlier evaluation.
        last: iteration of the later evaluation; a prompt that is in only one of them is left out.
        diversity: name of the reading that measures it.

    Raises:
        ValueError: one of the galleries is damaged.
    """
    before, after = (read_gallery(gallery, iteration) for iteration in (first, last))
    both = [prompt for prompt in before if prompt in after]
    both.sort(key=lambda prompt: -np.nan_to_num(after[prompt].reading - before[prompt].reading))
    cells = [cell_of(prompt, before[prompt], after[prompt]) for prompt in both]
    scores = [[before[prompt].reading, after[prompt].reading] for prompt in both]
    said = before_after_text(read_heldout(gallery.parent), scores, first=first, last=last, diversity=diversity)
    title = f"iteration {first} and {last}, same noise; {said}{beside_text(list(after.values()))}"
    return write_grid(gallery / "before_after.png", cells, title)


def before_after_text(
    held: Sequence[HeldoutScores],
    shown: Sequence[Sequence[float]],
    *,
    first: int,
    last: int,
    diversity: str | None,
) -> str:
    """Say what the images of two evaluations score.

    Args:
        held: the evaluations of the run.
        shown: scores before and after of the prompts that are shown.
        first: iteration of the earlier evaluation.
        last: iteration of the later evaluation.
        diversity: name of the reading that measures it.

    Returns:
        Such as `score of all 384 images: 0.469 → 0.674; diversity falls: 0.385 → 0.258`. It also has the mean of the
        prompts shown if these are not all.
    """
    ends = {each.iteration: each for each in held if each.iteration in (first, last)}
    scores = [score_of(ends[iteration]) if iteration in ends else None for iteration in (first, last)]
    pairs = np.array(shown, float)
    known = pairs[np.isfinite(pairs).all(1)]
    parts = []
    if len(known) and (None in scores or len(known) < len(ends[last].prompts)):
        parts.append(f"mean of the {len(known)} shown: {known[:, 0].mean():.3f} → {known[:, 1].mean():.3f}")
    if None not in scores:
        images = np.isfinite(ends[last].table()).sum()
        parts.append(f"score of all {images} images: {scores[0]:.3f} → {scores[1]:.3f}")
        parts.append(change_text(ends[first], ends[last], diversity) if diversity else "")
    return "; ".join(filter(None, parts))


def gallery_images(gallery: Sequence[tuple[Prompt, np.ndarray, float]]) -> list[GalleryImage]:
    """Put the images that prompts name beside an evaluation's images; white where only other prompts name one.

    Raises:
        PromptError: a condition image or a wanted image has changed, or is not there any more.
    """
    has_condition = any(prompt.conditions for prompt, _, _ in gallery)
    has_wanted = any(prompt.wanted for prompt, _, _ in gallery)
    return [
        GalleryImage(
            image,
            reading,
            _fitted(next(iter(prompt.conditions), None), image.shape) if has_condition else None,
            _fitted(prompt.wanted, image.shape) if has_wanted else None,
        )
        for prompt, image, reading in gallery
    ]


def distinct(texts: Sequence[str]) -> list[str]:
    """Number texts that come again: prompts of different images may have one text."""
    seen: Counter[str] = Counter()
    found = []
    for text in texts:
        seen[text] += 1
        found.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return found


def read_gallery(gallery: Path, iteration: int) -> dict[str, GalleryImage]:
    """Read the images of an evaluation by prompt.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = gallery / iteration_name(iteration, ".npz")
    try:
        with np.load(path, allow_pickle=False) as held:
            prompts, images, readings = (held[name] for name in ("prompts", "images", "readings"))
            beside = [held.get(name) for name in BESIDE]
    except Exception as error:  # damaged bytes raise many kinds
        raise ValueError(f"gallery {path} cannot be read: {one_line(error)}") from error
    kinds = prompts.dtype.kind, images.dtype, readings.dtype.kind
    is_whole = images.ndim == 4 and images.shape[-1] == 3 and 0 not in images.shape
    is_whole = is_whole and all(each is None or each.shape == images.shape for each in beside)
    if kinds != ("U", np.uint8, "f") or not is_whole or not prompts.shape == readings.shape == images.shape[:1]:
        raise ValueError(f"gallery {path} must hold a prompt, an image and a reading for each other")
    rows = zip(
        images,
        readings.tolist(),
        *(repeat(None, len(images)) if each is None else each for each in beside),
        strict=True,
    )
    return dict(zip(prompts.tolist(), starmap(GalleryImage, rows), strict=True))


Cells = list[tuple[str, list[np.ndarray], list[float | None]]]
"""Per prompt: its text, its images uint8 [H, W, 3], and their readings (NaN: no score; None: an image that gets none),
or no readings at all."""


def cell_of(prompt: str, *shown: GalleryImage) -> tuple[str, list[np.ndarray], list[float | None]]:
    """Return the cell of one prompt's images: the image that it edits, its images, and the wanted one."""
    first, last = ([] if each is None else [(each, None)] for each in (shown[-1].condition, shown[-1].wanted))
    images, readings = zip(*first, *((each.image, each.reading) for each in shown), *last, strict=True)
    return prompt, list(images), list(readings)


def beside_text(shown: Sequence[GalleryImage]) -> str:
    """Say what `cell_of` puts beside the images; empty if nothing."""
    names = [
        "" if shown[0].condition is None else "; left: the image to edit",
        "" if shown[0].wanted is None else "; right: the wanted image",
    ]
    return "".join(names)


def side_by_side(shown: GalleryImage) -> np.ndarray:
    """Join an image and the images that belong beside it, with a white gap between them."""
    _, images, _ = cell_of("", shown)
    gap = np.full((images[0].shape[0], max(1, images[0].shape[1] // 16), 3), 255, np.uint8)
    return np.hstack([part for image in images for part in (gap, image)][1:])


def _fitted(file: ConditionImage | None, shape: tuple[int, ...]) -> np.ndarray:
    """Return an image at the size of another, without stretching it; white without a file."""
    from PIL import Image, ImageOps

    if file is None:
        return np.full(shape, 255, np.uint8)
    image = read_condition(file)
    if image.shape == shape:
        return image
    return np.asarray(ImageOps.pad(Image.fromarray(image), (shape[1], shape[0]), color="white"))


def write_grid(path: Path, cells: Cells, title: str) -> Path:
    """Draw a grid with `png_of_grid` and write it.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, png_of_grid(cells, title))
    return path


def png_of_grid(cells: Cells, title: str, facts: Mapping[str, str] | None = None) -> bytes:
    """Draw a grid of prompts; a verdict (0 or 1) colours an image's frame, other scores are written below it."""
    wide, pixels = len(cells[0][1]), cells[0][1][0].shape
    most = 2 * COLUMNS if len(cells) > MANY else COLUMNS
    columns = min(len(cells), most if wide <= 2 else max(1, 2 * most // wide))
    known = {reading for _, _, readings in cells for reading in readings if reading is not None and reading == reading}
    is_verdict = known <= {0.0, 1.0}
    has_scores = any(readings for _, _, readings in cells)
    legend = "green: right, red: wrong, grey: no score" if is_verdict else "below each: mean over its prompt's images"
    across, high = SPACE + IMAGE * wide, IMAGE * pixels[0] / pixels[1]
    heading = _lines(f"{title} ({legend})" if has_scores else title, across * columns, size=9)
    prompts = [_lines(prompt, across - GAP, size=7) for prompt, _, _ in cells]
    above = LINE * max(prompt.count("\n") + 1 for prompt in prompts) + GAP
    top, down = LINE * (heading.count("\n") + 2), above + high + (GAP if is_verdict else 2 * LINE)
    size = (across * columns, top + down * -(-len(cells) // columns))
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, size[0]), ylim=(size[1], 0), autoscale_on=False)
    axes.set_axis_off()
    write = partial(axes.text, ha="center", parse_math=False)
    write(size[0] / 2, LINE / 2, heading, va="top", fontsize=9)
    for number, (prompt, (_, images, readings)) in enumerate(zip(prompts, cells, strict=True)):
        left, upper = across * (number % columns), top + down * (number // columns) + above
        write(left + across / 2, upper - GAP / 2, prompt, va="bottom", fontsize=7)
        between = (across - IMAGE * wide) / (wide + 1)
        for index, (image, reading) in enumerate(zip(images, readings or [np.nan] * wide, strict=True)):
            x = left + between + index * (IMAGE + between)
            axes.imshow(image, interpolation="nearest", aspect="auto", extent=(x, x + IMAGE, upper + high, upper))
            if reading is None:
                continue
            if has_scores:
                colour = _colour(reading) if is_verdict else "grey"
                axes.add_patch(Rectangle((x, upper), IMAGE, high, fill=False, edgecolor=colour, linewidth=2.5))
            if not is_verdict:
                score = "no score" if np.isnan(reading) else f"{reading:.3f}"
                write(x + IMAGE / 2, upper + high + GAP / 2, score, va="top", fontsize=7)
    FigureCanvasAgg(figure)
    png = io.BytesIO()
    figure.savefig(png, dpi=min(LARGEST, max(DPI, pixels[1] / IMAGE)), metadata=dict(facts or {}))
    return png.getvalue()


def _lines(text: str, inches: float, *, size: float) -> str:
    """Break a text into at most `MOST_LINES` lines that are `inches` long; the letters are `size` points high."""
    letters = int(inches * 72 / (0.55 * size))
    return "\n".join(wrap(text, letters, max_lines=MOST_LINES, placeholder=" …"))


def _colour(reading: float) -> str:
    if np.isnan(reading):
        return "grey"
    return PASS if reading >= 1.0 else FAIL
