"""Paired bootstrap of held-out scores: an interval for the difference between two evaluations of the same prompts.

A held-out score is the mean over kinds of prompts of the mean over each kind's images. A resample takes prompts of each
kind with replacement, the same ones in both evaluations. The interval covers the choice of prompts of the same kinds;
it does not cover the choice of training seeds.
"""

from collections.abc import Sequence

import numpy as np

from deploy.folder.heldout import HeldoutScores
from deploy.report.runs import Group
from protocol.status import Document

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 2**22
"""Most numbers in one chunk of resamples."""


class Difference(Document):
    """A difference of two held-out scores, with its 95 % interval."""

    value: float
    """The second score minus the first."""
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0; for the report's template."""
        return self.low > 0 or self.high < 0


def why_unpaired(before: HeldoutScores, after: HeldoutScores) -> str | None:
    """Return the reason why two evaluations cannot be compared prompt by prompt; None if they can."""
    for what in ("prompts", "tags", "seed", "steps"):
        if getattr(before, what) != getattr(after, what):
            return f"the evaluations differ in their {what}"
    sizes = [(each.height, each.width) for each in (before, after)]
    if None not in (*sizes[0], *sizes[1]) and sizes[0] != sizes[1]:
        return "the evaluations have images of different sizes"
    if before.table().shape != after.table().shape:
        return "the evaluations have different numbers of images per prompt"
    return None


def paired_difference(
    before: Sequence[HeldoutScores], after: Sequence[HeldoutScores], *, tag: str | None = None
) -> Difference | None:
    """Compare evaluations of the same prompts from the same noise.

    Args:
        before: evaluations to pool, for example those of several runs.
        after: evaluations of the same prompts to pool and compare with those.
        tag: kind of prompts; None for the mean over all kinds.

    Returns:
        The difference with its 95 % interval; None if a kind has no score.
    """
    tags = np.array(before[0].tags)
    kinds = [tag] if tag else list(dict.fromkeys(tags.tolist()))
    sums = [_sums(each) for each in (before, after)]
    rng = np.random.default_rng(0)
    points, drawn = np.zeros(2), np.zeros((2, RESAMPLES))
    for kind in kinds:
        rows = tags == kind
        counts = rows.sum()
        if not counts or not all(images[rows].sum() for _, images in sums):
            return None
        points += [total[rows].sum() / images[rows].sum() for total, images in sums]
        size = max(1, CHUNK // int(counts))
        for start in range(0, RESAMPLES, size):
            end = min(RESAMPLES, start + size)
            times = rng.multinomial(counts, np.full(counts, 1 / counts), size=end - start)
            for row, (total, images) in enumerate(sums):
                with np.errstate(invalid="ignore", divide="ignore"):
                    drawn[row, start:end] += (times @ total[rows]) / (times @ images[rows])
    points, drawn = points / len(kinds), drawn / len(kinds)
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.nanquantile(drawn[1] - drawn[0], edges)
    return Difference(value=points[1] - points[0], low=low, high=high, prompts=np.isin(tags, kinds).sum())


def change_of(group: Group, tag: str | None = None) -> tuple[Difference | None, str]:
    """Compare a group's newest evaluations with its first ones, prompt by prompt; the images of its runs are pooled.

    Returns:
        The difference for one kind of prompts, or for all; None, and the reason, if there is none.
    """
    ends = [(run.heldout[0], run.heldout[-1]) for run in group.runs if len(run.heldout) > 1]
    if not ends:
        return None, "no two evaluations with scores by prompt"
    first = ends[0][0]
    for held in (each for pair in ends for each in pair):
        if reason := why_unpaired(first, held):
            return None, reason
    found = paired_difference([a for a, _ in ends], [b for _, b in ends], tag=tag)
    return found, "" if found else "a kind of prompts without a score"


def _sums(evaluations: Sequence[HeldoutScores]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the scores and the number of scored images of each prompt, [P] each."""
    tables = [each.table() for each in evaluations]
    total = sum(np.nansum(table, axis=1) for table in tables)
    images = sum(np.isfinite(table).sum(axis=1) for table in tables)
    return np.asarray(total, float), np.asarray(images, float)
