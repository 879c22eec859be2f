"""Compares two runs, or two groups of seeds: numbers, held-out scores with intervals for their difference, configs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploy.folder.heldout import HeldoutScores
from deploy.folder.paired import LEVEL, RESAMPLES, Difference, group_difference, score_of, why_unpaired
from deploy.monitor.summary import STAGE, number
from deploy.presets import method_of
from deploy.report.runs import (
    HELDOUT,
    REWARD,
    SECONDS,
    Run,
    SeedGroup,
    change_of,
    code_of,
    config_differences,
    group_of,
    groups_of,
    read_runs,
    rough_duration,
)
from protocol.errors import RunFolderError
from protocol.status import Document

DIAGNOSTICS = (
    "train/approx_kl",
    "train/ratio_mean",
    "train/clip_fraction",
    "train/grad_norm",
    "reward/group_std",
)
ALL = "all kinds"


class Fact(Document):
    """One number of both runs, or its mean over the runs of each group."""

    name: str
    first: float | None
    second: float | None


class Heldout(Document):
    """The newest held-out scores of both runs for one kind of prompts, or for all kinds."""

    kind: str
    first: float
    second: float
    difference: Difference | None
    """Second minus first, prompt by prompt; null if the evaluations cannot be paired."""
    first_change: Difference | None
    """Change of the first run from its first to its newest evaluation."""
    second_change: Difference | None
    """The same for the second run."""


class Comparison(Document):
    """Two runs side by side."""

    first: str
    second: str
    verdict: str
    """Which one is better, with the interval, and what each has reached at what cost."""
    facts: list[Fact]
    heldout: list[Heldout]
    differences: dict[str, tuple[Any, Any]]
    """Config keys that differ, including the seed, with the value of each run."""
    notes: list[str]
    """Numbers that cannot be compared, with the reasons."""
    resamples: int = RESAMPLES
    level: float = LEVEL


def compare(first: Path | Sequence[Path], second: Path | Sequence[Path]) -> Comparison:
    """Compare two run folders, or two groups of run folders whose runs differ in the seed.

    Raises:
        RunFolderError: a folder holds no run or no metrics, or stands twice.
    """
    sides = [[side] if isinstance(side, Path) else list(side) for side in (first, second)]
    paths = [path for side in sides for path in side]
    for path in paths:
        if [other.resolve() for other in paths].count(path.resolve()) > 1:
            raise RunFolderError(f"two different runs must be given, got {path} twice: name another one")
    runs = read_runs(paths)
    for run in runs:
        if not run.iterations and not run.evaluations:
            raise RunFolderError(f"a run must have metrics to be compared, got none in {run.path}: train it first")
    notes = [
        f"{run.name}: {run.damaged} lines of metrics cannot be read and are left out" for run in runs if run.damaged
    ]
    one, other = (group_of(side) for side in (runs[: len(sides[0])], runs[len(sides[0]) :]))
    for group in (one, other):
        if len(groups_of(group.runs)) > 1:
            keys = ", ".join(key for key, _ in config_differences(groups_of(group.runs)))
            notes.append(f"{group.name}: its runs differ in more than the seed: {keys}")
    seeds = [[run.config.seed for run in group.runs] for group in (one, other)]
    if len(runs) == 2:
        seeds = [seed for group in seeds for seed in group]
    facts, heldout = list(_facts(one, other)), _heldout(one, other, notes)
    return Comparison(
        first=one.label,
        second=other.label,
        verdict=verdict_of(one, other, heldout[0].difference if heldout else None),
        facts=facts,
        heldout=heldout,
        differences={
            key: (a, b)
            for key, (a, b) in (
                ("method", [method_of(group.runs[0].config) for group in (one, other)]),
                ("code", [code_of(group) for group in (one, other)]),
                ("seed", seeds),
                *config_differences([one, other]),
            )
            if a != b
        },
        notes=notes,
    )


def verdict_of(one: SeedGroup, other: SeedGroup, difference: Difference | None) -> str:
    """Say which of two groups has the higher held-out score, and what each has reached at what cost."""
    results = f"{result_of(one)}; {result_of(other)}."
    if difference is None:
        return f"There is no interval for the difference of {one.name} and {other.name}: {results}"
    over = "seeds and prompts" if difference.has_seeds else "prompts; other seeds are not in it"
    value, low, high = difference.value, difference.low, difference.high
    if not difference.is_clear:
        where = f"{other.name} minus {one.name}: {value:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} over {over}"
        return f"The difference of {one.name} and {other.name} is within chance ({where}). {results}"
    better, worse = other, one
    if value < 0:
        better, worse, value, low, high = one, other, -value, -high, -low
    where = f"{value:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} over {over}"
    return f"{better.name} is better than {worse.name} ({where}). {results}"


def difference_of(one: SeedGroup, other: SeedGroup) -> Difference | None:
    """Compare the newest held-out scores of two groups; None if they cannot be paired."""
    rows = _heldout(one, other, [])
    return rows[0].difference if rows else None


def result_of(group: SeedGroup) -> str:
    """Say what a group has reached and what it took: `tree (3 seeds): 0.674 after 1.4 min of training each`."""
    ends = group.first_and_last(HELDOUT, of="evaluations")
    score = "no held-out score" if ends is None else f"held-out score {number(ends[1])}"
    seconds = float(np.mean([run.seconds for run in group.runs]))
    gpus = group.runs[0].config.reserved.get("GPU", 0.0)
    cost = f" on {gpus:g} GPU{'s' if gpus > 1 else ''}" if gpus else ""
    each = " each" if len(group.runs) > 1 else ""
    return f"{group.label}: {score} after {rough_duration(seconds)} of training{cost}{each}"


def _facts(one: SeedGroup, other: SeedGroup) -> Sequence[Fact]:
    both = (one, other)
    counts, seconds = (
        [float(np.mean([of(run) for run in group.runs])) for group in both]
        for of in (lambda run: len(run.iterations), lambda run: run.seconds)
    )
    facts = [
        Fact(name="iterations", first=counts[0], second=counts[1]),
        Fact(name="training seconds", first=seconds[0], second=seconds[1]),
    ]
    for name, of, word in ((REWARD, "iterations", "reward"), (HELDOUT, "evaluations", "held-out score")):
        ends = [group.first_and_last(name, of=of) or (None, None) for group in both]
        for row, end in enumerate(("first", "last")):
            facts.append(Fact(name=f"{word}, {end}", first=ends[0][row], second=ends[1][row]))
    stages = dict.fromkeys(name for group in both for name in group.names(STAGE))
    means = [SECONDS, *(name for name in stages if name not in (SECONDS, f"{STAGE}evaluation")), *DIAGNOSTICS]
    facts += [Fact(name=f"{name}, mean", first=one.mean(name), second=other.mean(name)) for name in means]
    return [fact for fact in facts if fact.first is not None or fact.second is not None]


def _heldout(one: SeedGroup, other: SeedGroup, notes: list[str]) -> list[Heldout]:
    """Compare the newest evaluations; add a line to `notes` for what cannot be compared."""
    firsts, seconds = ([each for run in group.runs if (each := _newest(run, notes))] for group in (one, other))
    if not firsts or not seconds:
        return []
    newest, first = [*firsts, *seconds], firsts[0]
    reason = next((reason for each in newest[1:] if (reason := why_unpaired(first, each))), None)
    if reason:
        notes.append(f"held-out scores are not paired: {reason}")
    if len(components := dict.fromkeys(each.component for each in newest)) > 1:
        notes.append(f"held-out scores are of {' and of '.join(components)}")
    if len(iterations := dict.fromkeys(str(each.iteration) for each in newest)) > 1:
        notes.append(f"the newest evaluations are of iterations {' and '.join(iterations)}")
    rows = []
    for kind in (ALL, *dict.fromkeys(first.tags)):
        tag = None if kind == ALL else kind
        scores = [[score_of(each, tag) for each in side] for side in (firsts, seconds)]
        known = [[score for score in side if score is not None] for side in scores]
        if known != scores:
            continue
        means = [float(np.mean(side)) for side in known]
        rows.append(
            Heldout(
                kind=kind,
                first=means[0],
                second=means[1],
                difference=None if reason else group_difference(firsts, seconds, tag=tag),
                first_change=change_of(one, tag)[0],
                second_change=change_of(other, tag)[0],
            )
        )
    return rows


def _newest(run: Run, notes: list[str]) -> HeldoutScores | None:
    if not run.heldout:
        notes.append(f"{run.name} has no held-out scores by prompt, so there is no interval")
        return None
    return run.heldout[-1]
