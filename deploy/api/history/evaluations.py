"""The evaluations of a run: scores by prompt over its iterations, and the images of its gallery."""

import base64
import io
import re
import zipfile
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from deploy.folder.heldout import SCORE, HeldoutScores, read_heldout
from deploy.folder.names import GALLERY
from protocol.status import Document

IMAGES = re.compile(r"iteration_(\d{6,})\.npz")
MOST_EVALUATIONS, MOST_PROMPTS = 100, 2_000
"""Of one answer: evaluations are thinned evenly, the first and the newest stay; later prompts are left out."""
RUNS_HELD = 4
LARGEST = 256
"""Pixels: larger images of a gallery are shown smaller."""
SMALL = 96
"""Pixels up to which images are sent as PNG; larger ones as JPEG."""
MOST_IMAGES = 64


class Evaluations(Document):
    """The held-out scores of a run: E evaluations of P prompts."""

    readings: list[str]
    """What can be shown: `score`, and every scorer and component."""
    reading: str
    """What `scores` are."""
    iterations: list[int]
    """[E]"""
    prompts: list[str]
    """[P] of the newest evaluation."""
    tags: list[str]
    """[P] the kind of each prompt."""
    scores: list[list[float | None]]
    """[E][P] mean over a prompt's images; null where none has a score, or where the evaluation had other prompts."""
    left_out: int
    """Prompts beyond the first 2,000."""
    galleries: list[int]
    """Iterations whose images are kept."""


class GalleryImages(Document):
    """Images of one evaluation. They are one image: cells beside each other."""

    iteration: int
    prompts: list[str]
    """[G]"""
    scores: list[float | None]
    """[G] reading of each image."""
    width: int
    """Of a cell, pixels."""
    height: int
    media: str
    """`image/png` or `image/jpeg`."""
    image: str
    """Base64."""


class EvaluationFiles:
    """Reads the evaluations of run folders; those that were read lately are kept until one is added."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, list[HeldoutScores]]] = {}

    def scores(self, run: Path, reading: str) -> Evaluations:
        """Return scores by prompt and evaluation; `reading` names them, and an unknown one has none."""
        found = self._read(run)
        galleries = galleries_of(run)
        if not found:
            return Evaluations(
                readings=[],
                reading=reading,
                iterations=[],
                prompts=[],
                tags=[],
                scores=[],
                left_out=0,
                galleries=galleries,
            )
        shown = _spread(found)
        newest = found[-1]
        prompts, tags = newest.prompts[:MOST_PROMPTS], newest.tags[:MOST_PROMPTS]
        return Evaluations(
            readings=[SCORE, *sorted(name for name in newest.scores if name != SCORE)],
            reading=reading,
            iterations=[each.iteration for each in shown],
            prompts=prompts,
            tags=tags,
            scores=[_means(each, reading, newest.prompts)[: len(prompts)] for each in shown],
            left_out=len(newest.prompts) - len(prompts),
            galleries=galleries,
        )

    def _read(self, run: Path) -> list[HeldoutScores]:
        try:
            changed = (run / GALLERY).stat().st_mtime_ns
        except OSError:
            return []
        held = self._held.pop(run, None)
        if held is None or held[0] != changed:
            held = changed, sorted(read_heldout(run), key=lambda each: each.iteration)
        while len(self._held) >= RUNS_HELD:
            self._held.pop(next(iter(self._held)))
        self._held[run] = held
        return held[1]


def galleries_of(run: Path) -> list[int]:
    """List the iterations whose images a run folder keeps."""
    found = (IMAGES.fullmatch(path.name) for path in (run / GALLERY).glob("iteration_*.npz"))
    return sorted(int(match[1]) for match in found if match)


def images_of(run: Path, iteration: int) -> GalleryImages | None:
    """Return the images of an evaluation, small enough for a page; None if there are none, or if they are damaged."""
    from PIL import Image

    from deploy.folder.gallery import read_gallery  # matplotlib, which a server needs for nothing else

    try:
        held = read_gallery(run / GALLERY, iteration)
        images = [image for image, _ in held.values()][:MOST_IMAGES]
        height, width = images[0].shape[:2]
        scale = min(1.0, LARGEST / max(height, width))
        size = max(1, round(width * scale)), max(1, round(height * scale))
        sheet = Image.new("RGB", (size[0] * len(images), size[1]))
        for index, image in enumerate(images):
            cell = Image.fromarray(image)
            sheet.paste(cell if cell.size == size else cell.resize(size), (index * size[0], 0))
        form = "PNG" if max(size) <= SMALL else "JPEG"
        out = io.BytesIO()
        sheet.save(out, form, **({} if form == "PNG" else {"quality": 88}))
        return GalleryImages(
            iteration=iteration,
            prompts=list(held)[:MOST_IMAGES],
            scores=[_number(score) for _, score in held.values()][:MOST_IMAGES],
            width=size[0],
            height=size[1],
            media=f"image/{form.lower()}",
            image=base64.b64encode(out.getvalue()).decode(),
        )
    except (OSError, ValueError, KeyError, IndexError, EOFError, TypeError, zipfile.BadZipFile, ValidationError):
        return None


def _spread(found: list[HeldoutScores]) -> list[HeldoutScores]:
    if len(found) <= MOST_EVALUATIONS:
        return found
    return [found[int(index)] for index in np.linspace(0, len(found) - 1, MOST_EVALUATIONS)]


def _means(held: HeldoutScores, reading: str, prompts: list[str]) -> list[float | None]:
    table = held.table(reading)
    counts = np.isfinite(table).sum(1)
    means = np.divide(np.nansum(table, axis=1), counts, out=np.full(len(table), np.nan), where=counts > 0)
    if held.prompts == prompts:
        return [_number(mean) for mean in means.tolist()]
    by_prompt = dict(zip(held.prompts, means.tolist(), strict=True))
    return [_number(by_prompt.get(prompt, np.nan)) for prompt in prompts]


def _number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
