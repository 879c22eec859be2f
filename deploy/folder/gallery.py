"""Images for people: the gallery of an evaluation, and a comparison of two evaluations at the same seeds."""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deploy.folder.heldout import HeldoutScores, read_heldout
from deploy.folder.paired import fallen, score_of
from learner.loop.evaluate import Evaluation
from protocol.errors import one_line
from protocol.ground.files import iteration_name, write_whole

PASS, FAIL = "#2e7d32", "#c62828"
COLUMNS, MANY = 4, 16
"""Prompts in a row of a grid; a grid of more than `MANY` has twice as many, so that it stays one sheet."""
DPI, LARGEST = 130, 280
"""Dots per inch of a grid: the usual number, and the highest, for large images."""
IMAGE, SPACE, GAP, LINE = 1.1, 0.5, 0.1, 0.14
"""In inches: an image's width, what a prompt takes besides its images, a small distance, and the height of a line."""
MOST_LINES = 6
"""Most lines of a prompt, and of the title."""


def write_gallery(gallery: Path, iteration: int, evaluation: Evaluation) -> None:
    """Write `iteration_NNNNNN.png`, and `.npz` with the same images, prompts and readings.

    Args:
        evaluation: the evaluation; its gallery holds images uint8 [H, W, 3] and the scores of their prompts.
    """
    prompts = np.array([prompt.text for prompt, _, _ in evaluation.gallery])
    images = np.stack([image for _, image, _ in evaluation.gallery])
    readings = np.array([reading for _, _, reading in evaluation.gallery], np.float32)
    arrays = io.BytesIO()
    np.savez(arrays, prompts=prompts, images=images, readings=readings)
    write_whole(gallery / iteration_name(iteration, ".npz"), arrays.getvalue())
    cells = [(prompt, [image], [reading]) for prompt, image, reading in zip(prompts, images, readings, strict=True)]
    title = f"held-out prompts at iteration {iteration}: score {evaluation.score:.3f}"
    write_grid(gallery / iteration_name(iteration, ".png"), cells, title)


def write_before_after(gallery: Path, *, first: int, last: int, diversity: str | None = None) -> Path:
    """Write `before_after.png`: the images of two evaluations side by side, each pair from the same noise.

    The pairs go from the largest rise of the score to the largest fall. The title says what all images score.

    Args:
        gallery: the folder that holds both galleries.
        first: iteration of the earlier evaluation.
        last: iteration of the later one; a prompt that is in only one of them is left out.
        diversity: name of the reading that measures it.

    Raises:
        ValueError: one of the galleries is damaged.
    """
    before, after = (read_gallery(gallery, iteration) for iteration in (first, last))
    both = [prompt for prompt in before if prompt in after]
    both.sort(key=lambda prompt: -np.nan_to_num(after[prompt][1] - before[prompt][1]))
    cells = [(prompt, [before[prompt][0], after[prompt][0]], [before[prompt][1], after[prompt][1]]) for prompt in both]
    scores = [readings for _, _, readings in cells]
    said = before_after_text(read_heldout(gallery.parent), scores, first=first, last=last, diversity=diversity)
    return write_grid(gallery / "before_after.png", cells, f"iteration {first} and {last}, same noise; {said}")


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
        last: iteration of the later one.
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
        parts.append(fallen(ends[first], ends[last], diversity) if diversity else "")
    return "; ".join(filter(None, parts))


def read_gallery(gallery: Path, iteration: int) -> dict[str, tuple[np.ndarray, float]]:
    """Read the images of an evaluation: uint8 [H, W, 3] and score (NaN: none) by prompt, the mean over all its images.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = gallery / iteration_name(iteration, ".npz")
    try:
        with np.load(path, allow_pickle=False) as held:
            prompts, images, readings = (held[name] for name in ("prompts", "images", "readings"))
    except Exception as error:  # damaged bytes raise many kinds
        raise ValueError(f"gallery {path} cannot be read: {one_line(error)}") from error
    kinds = prompts.dtype.kind, images.dtype, readings.dtype.kind
    is_whole = images.ndim == 4 and images.shape[-1] == 3 and 0 not in images.shape
    if kinds != ("U", np.uint8, "f") or not is_whole or not prompts.shape == readings.shape == images.shape[:1]:
        raise ValueError(f"gallery {path} must hold a prompt, an image and a reading for each other")
    return dict(zip(prompts.tolist(), zip(images, readings.tolist(), strict=True), strict=True))


Cells = list[tuple[str, list[np.ndarray], list[float]]]
"""Per prompt: its text, its images uint8 [H, W, 3], and their readings (NaN: no score), or no readings at all."""


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
    known = {reading for _, _, readings in cells for reading in readings if not np.isnan(reading)}
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
