"""Compares two runs: their numbers, the differences of their held-out scores with intervals, and their configs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploy.folder.heldout import HeldoutScores
from deploy.monitor.summary import STAGE
from deploy.report.paired import LEVEL, RESAMPLES, Difference, change_of, paired_difference, why_unpaired
from deploy.report.runs import HELDOUT, REWARD, SECONDS, Group, Run, differences, read_runs
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
    """One number of both runs."""

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
    facts: list[Fact]
    heldout: list[Heldout]
    differences: dict[str, tuple[Any, Any]]
    """Config keys that differ, including the seed, with the value of each run."""
    notes: list[str]
    """Numbers that cannot be compared, with the reasons."""
    resamples: int = RESAMPLES
    level: float = LEVEL


def compare(first: Path, second: Path) -> Comparison:
    """Compare two run folders.

    Raises:
        RunFolderError: one of them holds no run or no metrics, or both are the same.
    """
    if first.resolve() == second.resolve():
        raise RunFolderError(f"two different runs must be given, got {first} twice: name another one")
    runs = read_runs([first, second])
    for run in runs:
        if not run.iterations and not run.evaluations:
            raise RunFolderError(f"a run must have metrics to be compared, got none in {run.path}: train it first")
    notes = [
        f"{run.name}: {run.damaged} lines of metrics cannot be read and are left out" for run in runs if run.damaged
    ]
    one, other = (Group(name=run.name, runs=[run]) for run in runs)
    keys = {key: (a, b) for key, (a, b) in differences([one, other])}
    seeds = runs[0].config.seed, runs[1].config.seed
    return Comparison(
        first=runs[0].name,
        second=runs[1].name,
        facts=list(_facts(one, other)),
        heldout=_heldout(one, other, notes),
        differences=({"seed": seeds} if seeds[0] != seeds[1] else {}) | keys,
        notes=notes,
    )


def _facts(one: Group, other: Group) -> Sequence[Fact]:
    both, first, second = (one, other), one.runs[0], other.runs[0]
    facts = [
        Fact(name="iterations", first=len(first.iterations), second=len(second.iterations)),
        Fact(name="training seconds", first=first.seconds, second=second.seconds),
    ]
    for name, of, word in ((REWARD, "iterations", "reward"), (HELDOUT, "evaluations", "held-out score")):
        ends = [group.first_and_last(name, of=of) or (None, None) for group in both]
        for row, end in enumerate(("first", "last")):
            facts.append(Fact(name=f"{word}, {end}", first=ends[0][row], second=ends[1][row]))
    stages = dict.fromkeys(name for group in both for name in group.names(STAGE))
    means = [SECONDS, *(name for name in stages if name not in (SECONDS, f"{STAGE}evaluation")), *DIAGNOSTICS]
    facts += [Fact(name=f"{name}, mean", first=one.mean(name), second=other.mean(name)) for name in means]
    return [fact for fact in facts if fact.first is not None or fact.second is not None]


def _heldout(one: Group, other: Group, notes: list[str]) -> list[Heldout]:
    """Compare the newest evaluations; add a line to `notes` for what cannot be compared."""
    first, second = (_newest(group.runs[0], notes) for group in (one, other))
    if first is None or second is None:
        return []
    if reason := why_unpaired(first, second):
        notes.append(f"held-out scores are not paired: {reason}")
    if first.component != second.component:
        notes.append(f"held-out scores are of {first.component} and of {second.component}")
    if first.iteration != second.iteration:
        notes.append(f"the newest evaluations are of iterations {first.iteration} and {second.iteration}")
    rows = []
    for kind in (ALL, *dict.fromkeys(first.tags)):
        tag = None if kind == ALL else kind
        scores = _score(first, tag), _score(second, tag)
        if scores[0] is None or scores[1] is None:
            continue
        rows.append(
            Heldout(
                kind=kind,
                first=scores[0],
                second=scores[1],
                difference=None if reason else paired_difference([first], [second], tag=tag),
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


def _score(held: HeldoutScores, tag: str | None) -> float | None:
    """Return the held-out score of one kind, or the mean over all kinds; None if a kind has no score."""
    kinds = [tag] if tag else list(dict.fromkeys(held.tags))
    tables = [held.table()[np.array(held.tags) == kind] for kind in kinds]
    if any(not np.isfinite(table).any() for table in tables):
        return None
    return float(np.mean([np.nanmean(table) for table in tables]))
