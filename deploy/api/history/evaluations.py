"""The evaluations of a run: scores by prompt over its iterations, and the images of its gallery."""

import base64
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.api.folder_source import Stamps, stamps_of
from deploy.folder.heldout import SCORE, HeldoutScores, read_heldout, rounded
from deploy.folder.names import GALLERY
from deploy.folder.read import config_of
from protocol.errors import RunFolderError
from protocol.ground.files import by_iteration
from protocol.status import Document
from rewards.images import encoded

if TYPE_CHECKING:
    from deploy.folder.gallery import GalleryImage

MOST_EVALUATIONS, MOST_PROMPTS = 100, 2_000
"""Limits of one answer: evaluations are thinned evenly, keeping first and newest; later prompts are left out."""
RUNS_HELD = 4
LARGEST = 256
"""Pixels; larger images of a gallery are scaled down."""
SMALL = 96
"""Pixels up to which images are sent as PNG; larger ones are sent as JPEG."""
MOST_IMAGES = 64


class Evaluations(Document):
    """The held-out scores of a run: E evaluations of P prompts."""

    readings: list[str]
    """The available readings: `score`, and every scorer and component."""
    reading: str
    """The reading that `scores` holds."""
    iterations: list[int]
    """[E]"""
    prompts: list[str]
    """[P] prompts of the newest evaluation."""
    tags: list[str]
    """[P] tag of each prompt."""
    scores: list[list[float | None]]
    """[E][P] mean over a prompt's images; null if none has a score, or if the evaluation had other prompts."""
    left_out: int
    """Prompts beyond the first 2,000."""
    galleries: list[int]
    """Iterations whose images are kept."""


class GalleryImages(Document):
    """Images of one evaluation, as cells side by side in one image."""

    iteration: int
    prompts: list[str]
    """[G]"""
    scores: list[float | None]
    """[G] mean score of all images of each prompt; the image is its first."""
    change: str
    """What all images score at the first evaluation and at this one; empty at the first."""
    width: int
    """Width of a cell in pixels."""
    height: int
    image_width: int
    """Width of an evaluated image in pixels."""
    image_height: int
    beside: str
    """What a cell shows beside the image: the image to edit on the left, the wanted one on the right; or empty."""
    media: str
    """`image/png` or `image/jpeg`."""
    image: str
    """Base64."""


def scores(run: Path, reading: str) -> Evaluations:
    """Return scores by prompt and evaluation; `reading` names them, and an unknown one has none."""
    evaluations = _read(run, stamps_of(run, GALLERY))
    prompts, tags, readings = (
        (evaluations[-1].prompts, evaluations[-1].tags, evaluations[-1].scores) if evaluations else ([], [], {})
    )
    shown = [
        evaluations[int(index)]
        for index in np.linspace(0, len(evaluations) - 1, min(len(evaluations), MOST_EVALUATIONS))
    ]
    return Evaluations(
        readings=sorted(readings, key=lambda name: (name != SCORE, name)),
        reading=reading,
        iterations=[each.iteration for each in shown],
        prompts=prompts[:MOST_PROMPTS],
        tags=tags[:MOST_PROMPTS],
        scores=[_means(each, reading, prompts)[:MOST_PROMPTS] for each in shown],
        left_out=max(0, len(prompts) - MOST_PROMPTS),
        galleries=list(by_iteration(run / GALLERY, ".npz")),
    )


@lru_cache(maxsize=RUNS_HELD)
def _read(run: Path, _stamps: Stamps) -> list[HeldoutScores]:
    """Read a run's evaluations once until one is added."""
    return sorted(read_heldout(run), key=lambda each: each.iteration)


def images_of(run: Path, iteration: int) -> GalleryImages | None:
    """Return the images of an evaluation, small enough for a page; None if there are none, or if they are damaged."""
    from PIL import Image

    from deploy.folder.gallery import beside_text, read_gallery, side_by_side  # it imports matplotlib, rarely needed

    try:
        held = read_gallery(run / GALLERY, iteration)
        kept = list(held.values())[:MOST_IMAGES]
        images = [side_by_side(each) for each in kept]
        height, width = images[0].shape[:2]
        scale = min(1.0, LARGEST / max(kept[0].image.shape))
        size = max(1, round(width * scale)), max(1, round(height * scale))
        sheet = Image.new("RGB", (size[0] * len(images), size[1]))
        for index, image in enumerate(images):
            cell = Image.fromarray(image)
            sheet.paste(cell if cell.size == size else cell.resize(size), (index * size[0], 0))
        form = "PNG" if max(kept[0].image.shape) * scale <= SMALL else "JPEG"
        data = encoded(sheet, form, **({} if form == "PNG" else {"quality": 88}))
        return GalleryImages(
            iteration=iteration,
            prompts=list(held)[:MOST_IMAGES],
            scores=[rounded(each.reading) for each in kept],
            change=_change(run, iteration, held),
            width=size[0],
            height=size[1],
            image_width=kept[0].image.shape[1],
            image_height=height,
            beside=beside_text(kept),
            media=f"image/{form.lower()}",
            image=base64.b64encode(data).decode(),
        )
    except ValueError:
        return None


def _change(run: Path, iteration: int, now: "dict[str, GalleryImage]") -> str:
    from deploy.folder.gallery import before_after_text, read_gallery

    first = min(by_iteration(run / GALLERY, ".npz"))
    if first == iteration:
        return ""
    before, diversity = read_gallery(run / GALLERY, first), None
    with suppress(RunFolderError):
        diversity = config_of(run).diversity_reading
    shown = [[before[prompt].reading, now[prompt].reading] for prompt in now if prompt in before]
    return before_after_text(
        _read(run, stamps_of(run, GALLERY)), shown, first=first, last=iteration, diversity=diversity
    )


def _means(held: HeldoutScores, reading: str, prompts: list[str]) -> list[float | None]:
    table = held.table(reading)
    counts = np.isfinite(table).sum(1)
    means = np.divide(np.nansum(table, axis=1), counts, out=np.full(len(table), np.nan), where=counts > 0)
    if held.prompts == prompts:
        return [rounded(mean) for mean in means.tolist()]
    by_prompt = dict(zip(held.prompts, means.tolist(), strict=True))
    return [rounded(by_prompt.get(prompt, np.nan)) for prompt in prompts]
