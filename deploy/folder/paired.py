"""Intervals for the difference between two held-out scores: over the prompts, and over training seeds too.

A held-out score is the mean over kinds of prompts of the mean over each kind's images. A resample takes prompts of each
kind with replacement, the same ones in both evaluations. That interval covers the choice of prompts of the same kinds.
`group_difference` covers the choice of training seeds as well.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from deploy.folder.heldout import SCORE, HeldoutScores
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
    has_seeds: bool = False
    """Whether the interval covers the choice of training seeds, not only of prompts."""

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0; otherwise the difference may be chance."""
        return self.low > 0 or self.high < 0


def families_of(tags: Sequence[str]) -> list[str]:
    """List what stands before the first slash of kinds such as `en/color`, unless it is a kind itself."""
    found = dict.fromkeys(tag.partition("/")[0] for tag in tags if "/" in tag)
    return [family for family in found if family not in tags]


def kinds_of(tags: Sequence[str], tag: str | None) -> list[str]:
    """List the kinds that a score runs over: one kind, a family's kinds (`families_of`), or all for None."""
    kinds = list(dict.fromkeys(tags))
    if tag is None or tag in kinds:
        return kinds if tag is None else [tag]
    return [kind for kind in kinds if kind.startswith(f"{tag}/")]


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
    before: Sequence[HeldoutScores], after: Sequence[HeldoutScores], *, tag: str | None = None, name: str = SCORE
) -> Difference | None:
    """Compare evaluations of the same prompts from the same noise.

    Args:
        before: evaluations to pool, for example of several runs.
        after: evaluations of the same prompts, pooled and compared with the pool of `before`.
        tag: kind or family of prompts, see `kinds_of`; None for the mean over all kinds.
        name: of the readings; by default the readings that make the held-out score.

    Returns:
        The difference with its 95 % interval; None if a kind has no score.
    """
    found = _resampled(before, after, tag, name)
    if found is None:
        return None
    value, drawn, prompts = found
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(value=value, low=low, high=high, prompts=prompts)


def group_difference(
    first: Sequence[HeldoutScores], second: Sequence[HeldoutScores], *, tag: str | None = None
) -> Difference | None:
    """Compare two groups of runs that were trained with several seeds.

        se^2 = s^2 (1 / n + 1 / m) + the variance of the difference over resampled prompts
        interval = difference -+ t(n + m - 2) se

    s^2 is the pooled variance of the scores of a group's n, or m, runs. With one run in each group nothing tells how
    far seeds differ: the interval covers the prompts alone.

    Args:
        first: one evaluation of each run of the first group.
        second: one of each run of the second group; all evaluations have the same prompts and noise.
        tag: kind of prompts; None for the mean over all kinds.

    Returns:
        The second group's mean score minus the first group's; None if a kind has no score.
    """
    freedom = len(first) + len(second) - 2
    found = _resampled(first, second, tag, SCORE)
    if found is None or not freedom:
        return paired_difference(first, second, tag=tag)
    _, drawn, prompts = found
    one, other = (np.array([score_of(held, tag) for held in group], float) for group in (first, second))
    if np.isnan([*one, *other]).any():
        return None
    pooled = sum(((group - group.mean()) ** 2).sum() for group in (one, other)) / freedom
    error = np.sqrt(pooled * (1 / len(one) + 1 / len(other)) + np.nanvar(drawn))
    value, half = other.mean() - one.mean(), stdtrit(freedom, (1 + LEVEL) / 2) * error
    return Difference(value=value, low=value - half, high=value + half, prompts=prompts, has_seeds=True)


def score_of(held: HeldoutScores, tag: str | None = None, *, name: str = SCORE) -> float | None:
    """Return a reading's mean for one kind, or the mean over a family's or all kinds; None if a kind has none."""
    kinds = kinds_of(held.tags, tag)
    tables = [held.table(name)[np.array(held.tags) == kind] for kind in kinds]
    if any(not np.isfinite(table).any() for table in tables):
        return None
    return float(np.mean([np.nanmean(table) for table in tables]))


def change_text(before: HeldoutScores, after: HeldoutScores, name: str) -> str:
    """Write a reading before and after, and whether it fell by more than chance; empty without the reading."""
    ends = [score_of(held, name=name) for held in (before, after)]
    if None in ends or why_unpaired(before, after):
        return ""
    change = paired_difference([before], [after], name=name)
    falls = " falls:" if change and change.high < 0 else ""
    return f"{name}{falls} {ends[0]:.3f} → {ends[1]:.3f}"


def _resampled(
    before: Sequence[HeldoutScores], after: Sequence[HeldoutScores], tag: str | None, name: str
) -> tuple[float, np.ndarray, int] | None:
    """Return the difference of two pooled scores, `RESAMPLES` resampled ones, and the number of prompts."""
    tags = np.array(before[0].tags)
    kinds = kinds_of(before[0].tags, tag)
    sums = [_sums(each, name) for each in (before, after)]
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
    return points[1] - points[0], drawn[1] - drawn[0], int(np.isin(tags, kinds).sum())


def _sums(evaluations: Sequence[HeldoutScores], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the scores and the number of scored images of each prompt, [P] each."""
    tables = [each.table(name) for each in evaluations]
    total = sum(np.nansum(table, axis=1) for table in tables)
    images = sum(np.isfinite(table).sum(axis=1) for table in tables)
    return np.asarray(total, float), np.asarray(images, float)
