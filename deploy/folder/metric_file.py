"""`metrics.jsonl` of a long run, read without holding it: an outline, pages of lines, and the last line."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.folder.read import line_of_text

ITERATION, EVALUATION = b'"reward/mean"', b'"evaluation/score"'
"""Text that only the line of an iteration holds, and text that only the line of an evaluation holds."""
NEWEST = 20
"""Newest iterations that an outline keeps: as many as a trend needs."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of the file in which the last line is looked for."""
Numbered = tuple[int, dict[str, Any]]
"""The number of a line in the file, from 1, and its content."""


@dataclass(frozen=True)
class Outline:
    """The offsets of the complete lines of a file, and the lines that a summary of the run needs."""

    offsets: Sequence[int]
    """Offset of each line in bytes, then the end of the last line."""
    lines: list[Numbered]
    """The first and the newest evaluation and the `NEWEST` newest iterations, oldest first; damaged ones left out."""

    @property
    def count(self) -> int:
        """Return the number of complete lines, damaged ones included."""
        return len(self.offsets) - 1


def outline_of(path: Path) -> Outline:
    """Read the whole file once, line by line; a file that is missing or cannot be read counts as empty."""
    offsets = array("Q", [0])
    iterations: deque[tuple[int, bytes]] = deque(maxlen=NEWEST)
    evaluations: list[Numbered] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                offsets.append(offsets[-1] + len(text))
                if ITERATION in text:
                    iterations.append((number, text))
                if EVALUATION in text and (line := _line(text)):
                    evaluations = [*evaluations[:1], (number, line)]
    except OSError:
        return Outline(array("Q", [0]), [])
    kept = [(number, line) for number, text in iterations if (line := _line(text))]
    return Outline(offsets, sorted(dict([*evaluations, *kept]).items()))


def page_of(path: Path, outline: Outline, *, since: int, limit: int) -> list[Numbered]:
    """Read lines by their numbers.

    Args:
        since: number of the line after which the page begins; 0 for the beginning of the file.

    Returns:
        The lines, oldest first; damaged ones are left out.
    """
    end = min(outline.count, since + limit)
    if since >= end:
        return []
    first, last = outline.offsets[since], outline.offsets[end]
    try:
        with path.open("rb") as file:
            file.seek(first)
            texts = file.read(last - first).split(b"\n")
    except OSError:
        return []
    return [(number, line) for number, text in enumerate(texts[:-1], start=since + 1) if (line := _line(text))]


def each_of(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the complete lines, None for a damaged one; a file that is missing or cannot be read counts as empty."""
    with suppress(OSError), path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield _line(text)


def last_line(path: Path) -> dict[str, Any] | None:
    """Read the last complete line from the end of the file; None if there is none, or if it is damaged or too long."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            texts = file.read().split(b"\n")
    except OSError:
        return None
    return _line(texts[-2]) if len(texts) > 1 else None


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        return line_of_text(text)
    except (ValueError, RecursionError):
        return None
