"""A cell of a race, one variant with one seed on one reward: its training, and the curve of its held-out score."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import typer

from benchmarks.race.variants import COMMON, REWARDS, VARIANTS
from deploy.folder.read import evaluation_scores, lines_of
from deploy.monitor.progress import Progress
from deploy.presets import load_config
from deploy.run.run import run_training
from protocol.config.run import RunConfig

DIGITS = 5
"""Decimals of the published numbers."""


@dataclass(frozen=True)
class Cell:
    """One run of a race."""

    variant: str
    seed: int
    reward: str

    @property
    def folder(self) -> str:
        """Path of its run folder in the folder of the race."""
        return f"{self.reward}/{folder_name(self.variant)}/seed_{self.seed}"


def folder_name(name: str) -> str:
    """Return the name of a variant's or setting's folder."""
    for old, new in ((" = ", ""), ("=", ""), (", ", "-"), (" ", "_"), ("'", "")):
        name = name.replace(old, new)
    return name


def cells_in(runs: Path) -> list[Cell]:
    """Return the cells of the variants that have a run folder in the folder of a race."""
    names = {folder_name(name): name for name in VARIANTS}
    found = [path.relative_to(runs).parts for path in sorted(runs.glob("*/*/seed_*"))]
    return [Cell(names[name], int(seed.removeprefix("seed_")), reward) for reward, name, seed in found if name in names]


def require_known(kind: str, names: Collection[str], known: Collection[str]) -> None:
    """Check names from the command line (typer.BadParameter: one is unknown)."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"a {kind} must be one of {list(known)}, got {name!r}")


def cell_config(cell: Cell, *, iterations: int, every: int, extra: Sequence[str] = ()) -> RunConfig:
    """Put a cell's config together.

    Args:
        cell: the cell.
        iterations: length of the run.
        every: iterations between evaluations.
        extra: further config overrides, which win over the variant's.

    Returns:
        The whole config.
    """
    variant = VARIANTS[cell.variant]
    overrides = (
        f"method={variant.method}",
        f"seed={cell.seed}",
        f"iterations={iterations}",
        f"evaluation.every={every}",
        *COMMON,
        *REWARDS[cell.reward],
        *variant.keys,
        *extra,
    )
    return load_config("toy_geneval", overrides=overrides)


def run_cell(cell: Cell, runs: Path, *, iterations: int, every: int, extra: Sequence[str] = ()) -> None:
    """Train a cell, or continue it, unless it has been evaluated after so many iterations.

    Args:
        cell: the cell.
        runs: folder of the race.
        iterations: length of the run.
        every: iterations between evaluations.
        extra: further config overrides.
    """
    folder = runs / cell.folder
    if max(evaluation_scores(folder), default=-1) >= iterations:
        return
    config = cell_config(cell, iterations=iterations, every=every, extra=extra)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not run_training(config, folder=folder, is_local=True, progress=Progress()).finished:
        raise typer.Exit(130)


def seconds_an_iteration(folder: Path) -> float:
    """Return the training seconds of a run's iterations: all do the same work, so it is their 10 % quantile."""
    spent = [line["seconds/iteration"] for line in lines_of(folder) if "seconds/iteration" in line]
    return float(np.quantile(spent, 0.1))


def evaluations(folder: Path, **columns: str) -> dict[str, list[Any]]:
    """Read metrics of a run's evaluations.

    Args:
        folder: the run folder.
        columns: metrics by the names that they get.

    Returns:
        The values of each, by iteration.
    """
    lines = {line["iteration"]: line for line in lines_of(folder) if "evaluation/score" in line}
    return {name: [lines[at][metric] for at in sorted(lines)] for name, metric in columns.items()}


def read_cell(cell: Cell, runs: Path, **further: str) -> dict[str, Any]:
    """Read a cell's curve: `iterations` and `scores` of its evaluations, and further metrics of them."""
    columns = {"iterations": "iteration", "scores": "evaluation/score", **further}
    return {**asdict(cell), **evaluations(runs / cell.folder, **columns)}


def mean_curve(cells: Sequence[Mapping[str, Any]], of: Sequence[str]) -> dict[str, list[float]]:
    """Average the seeds at the evaluations that all of them have."""
    shared = sorted(set.intersection(*(set(cell["iterations"]) for cell in cells)))
    rows = {at: [(cell, cell["iterations"].index(at)) for cell in cells] for at in shared}
    means = {what: [statistics.fmean(cell[what][row] for cell, row in rows[at]) for at in shared] for what in of}
    return {"iterations": shared, **means}


def score_at(mean: Mapping[str, Sequence[float]], clock: str, budget: float) -> float | None:
    """Return the curve's score at the end of the budget, or None if the curve ends before."""
    return float(np.interp(budget, mean[clock], mean["scores"])) if mean[clock][-1] >= budget else None


def arrival(clock: Sequence[float], scores: Sequence[float], goal: float) -> float | None:
    """Return when the curve first reaches the goal, or None if it never does."""
    for index, score in enumerate(scores):
        if score >= goal:
            before = max(0, index - 1)
            return float(np.interp(goal, scores[before : index + 1], clock[before : index + 1]))
    return None


def deepest_fall(scores: Sequence[float]) -> float:
    """Return how far a curve falls at most below what it had reached."""
    return max(peak - score for peak, score in zip(accumulate(scores, max), scores, strict=True))


def rounded(value: Any) -> Any:
    """Return a tree of results with numbers rounded to `DIGITS` decimals."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
