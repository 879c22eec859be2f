"""Which credit rule learns fastest? Every method on the same preset, prompts, seeds and budget.

    python -m benchmarks.race.race run --iterations 60 --seconds 600    # resumable; every cell in a run folder
    python -m benchmarks.race.race run --only stepwise --seeds 1         # some cells
    python -m benchmarks.race.race report                                # JSON, plot and tables of all cells
    python -m benchmarks.race.race report --published docs/results/race_graded.json   # of another race

`report` joins the cells of the run folders with the published ones, `docs/results/race.json`; an own cell replaces
the published cell of the same variant, seed and reward. `report --out docs/results/race.json` publishes own cells.

A cell is (variant, seed, reward). A variant is a method with config keys; `benchmarks/race/variants.py` lists the
methods and the papers' ablations. A cell trains until it has both enough iterations and enough training seconds, so
that variants can be compared at equal iterations and at equal time. Seconds are those of generating, scoring and
learning, without evaluations: CPU seconds of the cell's one process with one thread, so other programs disturb them
little (`--wall` takes wall seconds). All iterations of a cell do the same work, so each counts as many seconds as the
cell's 10 % quantile, and all seeds of a variant count as the quickest of them.
The KL term and the running mean are off, and learning rate and clip range are the preset's for every variant, so that
only the credit differs.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.clock import cpu_clock
from benchmarks.race.plots import write_plot
from benchmarks.race.variants import COMMON, REWARDS, THREE_SEEDS, VARIANTS
from deploy.folder.read import lines_of
from deploy.monitor.progress import Progress
from deploy.monitor.summary import STEP_REWARD
from deploy.presets import load_config
from deploy.run.run import run_training
from protocol.config.run import RunConfig

RUNS = Path("runs/credit_race")
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "race.json"
"""Cells that were measured before, with their tables; part of the repository."""
EARLIER: Mapping[str, tuple[int, ...]] = {"pickscore": (20,), "redness": (15,)}
"""Iterations of Flow-GRPO whose scores are goals too, beside its end: a method that begins fast need not get far."""
DIGITS = 5
"""Decimals of the published numbers."""


@dataclass(frozen=True)
class Cell:
    """One run of the race."""

    variant: str
    seed: int
    reward: str

    @property
    def folder(self) -> str:
        """Path of its run folder in the folder of the race."""
        return f"{self.reward}/{self.variant.replace(', ', '-').replace(' ', '_').replace('=', '')}/seed_{self.seed}"


def cell_config(preset: str, cell: Cell, *, iterations: int, every: int, extra: Sequence[str]) -> RunConfig:
    """Put a cell's config together.

    Args:
        preset: name of the preset.
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
    return load_config(preset, overrides=overrides)


def run_cell(
    preset: str, cell: Cell, runs: Path, *, iterations: int, seconds: float, every: int, extra: Sequence[str]
) -> None:
    """Train a cell, or continue it, until it has both budgets.

    Args:
        preset: name of the preset.
        cell: the cell.
        runs: folder of the race.
        iterations: least number of iterations.
        seconds: least training seconds.
        every: iterations between evaluations.
        extra: further config overrides.
    """
    folder = runs / cell.folder
    while True:
        done, spent = reached(folder)
        is_evaluated = any(line["iteration"] == done for line in lines_of(folder) if "evaluation/score" in line)
        if done >= iterations and spent >= seconds and is_evaluated:
            return
        target = max(iterations, done + every if done >= iterations and is_evaluated else 0)
        config = cell_config(preset, cell, iterations=target, every=every, extra=extra)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not run_training(config, folder=folder, is_local=True, progress=Progress()).finished:
            raise typer.Exit(130)


def reached(folder: Path) -> tuple[int, float]:
    """Return the iterations and training seconds that a cell has so far."""
    seconds = _seconds(lines_of(folder))
    return len(seconds), sum(seconds)


def read_cell(cell: Cell, runs: Path) -> dict[str, Any] | None:
    """Read a cell's curve: iteration, training seconds and held-out score of every evaluation, and mean gains by step.

    Returns:
        The curve, or None if the cell has no evaluation yet.
    """
    lines = lines_of(runs / cell.folder)
    trained = [line for line in lines if "seconds/iteration" in line]
    clock = np.concatenate([[0.0], np.cumsum(_seconds(lines))])
    evaluations = {line["iteration"]: line["evaluation/score"] for line in lines if "evaluation/score" in line}
    if not evaluations:
        return None
    evaluated = sorted(iteration for iteration in evaluations if iteration < len(clock))
    gains: dict[str, list[float]] = {}
    for line in trained:
        for key, value in line.items():
            if (match := STEP_REWARD.fullmatch(key)) and value is not None:
                gains.setdefault(match[1], []).append(value)
    return {
        **asdict(cell),
        "iterations": evaluated,
        "seconds": [float(clock[iteration]) for iteration in evaluated],
        "scores": [evaluations[iteration] for iteration in evaluated],
        "train_reward": [line.get("reward/mean") for line in trained],
        "gains": {
            step: statistics.fmean(values) for step, values in sorted(gains.items(), key=lambda item: int(item[0]))
        },
        "zero_variance": _mean(line.get("group/zero_variance") for line in trained),
    }


def known_cells(runs: Path, published: Path = PUBLISHED) -> list[dict[str, Any]]:
    """Return the curves of all cells, those of `runs` and the published ones, in the order of the race.

    Each has the further key `measured`: `here`, or `published`. A cell of `runs` replaces the published one.
    """
    held = json.loads(published.read_text(encoding="utf-8"))["cells"] if published.exists() else []
    older = {Cell(each["variant"], each["seed"], each["reward"]): {**each, "measured": "published"} for each in held}
    begun = {folder.relative_to(runs).as_posix() for folder in runs.glob("*/*/seed_*")}
    found = []
    for cell in planned([], [], seeds=99):
        own = read_cell(cell, runs) if cell.folder in begun else None
        if curve := {**own, "measured": "here"} if own else older.get(cell):
            found.append(curve)
    return list(_at_equal_pace(found))


def _at_equal_pace(cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give all seeds of a variant the seconds an iteration of the quickest one, published and own ones apart."""
    paces: dict[tuple[str, ...], float] = {}
    for cell in cells:
        if cell["iterations"][-1]:
            pace, variant = cell["seconds"][-1] / cell["iterations"][-1], _variant_of(cell)
            paces[variant] = min(pace, paces.get(variant, pace))
    for cell in cells:
        yield {**cell, "seconds": [paces.get(_variant_of(cell), 0.0) * iteration for iteration in cell["iterations"]]}


def _variant_of(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return cell["variant"], cell["reward"], cell["measured"]


def summarise(cells: Sequence[Mapping[str, Any]], reward: str, until: int | None = None) -> list[dict[str, Any]]:
    """Return one row for each variant: scores at equal budgets, and the cost of reaching Flow-GRPO's final score.

    The budgets are the largest numbers of iterations and of training seconds that all methods have, and the seconds of
    Flow-GRPO's whole runs. The mean curve over the seeds is linear between evaluations. Shares are relative to
    Flow-GRPO's whole budget.

    Args:
        cells: the curves.
        reward: the reward whose cells count.
        until: the evaluated iteration at which Flow-GRPO's runs end; None for their own end.

    Returns:
        The rows; none without cells of Flow-GRPO, or if these have no evaluation at `until`.
    """
    own = [cell for cell in cells if cell["reward"] == reward]
    basis = [cell for cell in own if cell["variant"] == "flow_grpo"]
    if not basis:
        return []
    whole = mean_curve(basis)
    if until is not None:
        if until not in whole["iterations"]:
            return []
        whole = {name: values[: whole["iterations"].index(until) + 1] for name, values in whole.items()}
    goal = whole["scores"][-1]
    by_variant = {cell["variant"]: [each for each in own if each["variant"] == cell["variant"]] for cell in own}
    curves = {variant: mean_curve(own_cells) for variant, own_cells in by_variant.items()}
    methods = [mean for variant, mean in curves.items() if not VARIANTS[variant].keys]
    shared, shared_s = (min(mean[clock][-1] for mean in methods) for clock in ("iterations", "seconds"))
    rows = []
    for variant, mean in curves.items():
        iterations, seconds = (arrival(mean[clock], mean["scores"], goal) for clock in ("iterations", "seconds"))
        rows.append(
            {
                "variant": variant,
                "measured": " and ".join(sorted({each["measured"] for each in by_variant[variant]})),
                "seeds": len(by_variant[variant]),
                "end": mean["scores"][-1],
                "end_iteration": mean["iterations"][-1],
                "deepest_fall": statistics.fmean(deepest_fall(each["scores"]) for each in by_variant[variant]),
                f"at_iteration_{shared}": score_at(mean, "iterations", shared),
                f"at_{shared_s:.0f}_s": score_at(mean, "seconds", shared_s),
                f"at_{whole['seconds'][-1]:.0f}_s": score_at(mean, "seconds", whole["seconds"][-1]),
                "seconds_an_iteration": mean["seconds"][-1] / max(1, mean["iterations"][-1]),
                "goal_iterations": iterations,
                "share_of_iterations": iterations and iterations / whole["iterations"][-1],
                "goal_seconds": seconds,
                "share_of_seconds": seconds and seconds / whole["seconds"][-1],
            }
        )
    return [row | {"goal": goal} for row in rows]


def deepest_fall(scores: Sequence[float]) -> float:
    """Return how far a curve falls at most below what it had reached."""
    return max(peak - score for peak, score in zip(accumulate(scores, max), scores, strict=True))


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


def mean_curve(cells: Sequence[Mapping[str, Any]], of: Sequence[str] = ("scores", "seconds")) -> dict[str, list[float]]:
    """Average the seeds at the evaluations that all of them have."""
    shared = sorted(set.intersection(*(set(cell["iterations"]) for cell in cells)))
    means = {
        what: [statistics.fmean(_at(cell, iteration, what) for cell in cells) for iteration in shared] for what in of
    }
    return {"iterations": shared, **means}


def _at(cell: Mapping[str, Any], iteration: int, what: str) -> float:
    return cell[what][cell["iterations"].index(iteration)]


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _seconds(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return each iteration's training seconds: the 10 % quantile over all iterations."""
    trained = [line["seconds/iteration"] for line in lines if "seconds/iteration" in line]
    return [float(np.quantile(trained, 0.1))] * len(trained) if trained else []


def planned(only: Sequence[str], rewards: Sequence[str], seeds: int | None) -> list[Cell]:
    """List the cells of a race.

    Args:
        only: names of variants; all if empty.
        rewards: names of rewards; all if empty.
        seeds: seeds of each variant; by default three for the main methods and one for the others.

    Returns:
        The cells in the order in which they run: first one seed of every variant, then further seeds.

    Raises:
        typer.BadParameter: a name is unknown.
    """
    names = list(only) or list(VARIANTS)
    unknown = [name for name in [*names, *rewards] if name not in VARIANTS and name not in REWARDS]
    if unknown:
        raise typer.BadParameter(f"a variant or reward must be one of {[*VARIANTS, *REWARDS]}, got {unknown[0]!r}")
    most = {name: seeds or (3 if name in THREE_SEEDS else 1) for name in names}
    return [
        Cell(variant=name, seed=seed, reward=reward)
        for seed in range(max(most.values()))
        for reward in rewards or REWARDS
        for name in names
        if seed < most[name]
    ]


app = typer.Typer(add_completion=False, no_args_is_help=True)
Runs = Annotated[Path, typer.Option(help="Folder of the cells.")]


@app.command()
def run(
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides of every cell.")] = None,
    preset: Annotated[str, typer.Option(help="Preset of every variant.")] = "toy_geneval",
    iterations: Annotated[int, typer.Option(min=1, help="Least iterations of every cell.")] = 60,
    seconds: Annotated[float, typer.Option(min=0, help="Least training seconds of every cell.")] = 0.0,
    every: Annotated[int, typer.Option(min=1, help="Iterations between evaluations.")] = 10,
    only: Annotated[list[str] | None, typer.Option(help="Variants; by default all.")] = None,
    reward: Annotated[list[str] | None, typer.Option(help="Rewards; by default all.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of each variant; by default three for the main methods, else one.")
    ] = None,
    is_wall: Annotated[bool, typer.Option("--wall", help="Wall seconds instead of CPU seconds.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Train the cells one after the other; run the command again to continue."""
    cells = planned(only or [], reward or [], seeds)
    with nullcontext() if is_wall else cpu_clock():
        for index, cell in enumerate(cells):
            typer.echo(f"cell {index + 1} of {len(cells)}: {cell.folder}")
            run_cell(preset, cell, runs, iterations=iterations, seconds=seconds, every=every, extra=overrides or [])


@app.command()
def report(
    runs: Runs = RUNS,
    published: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="JSON file of cells that were measured before.")
    ] = PUBLISHED,
    out: Annotated[Path, typer.Option(help="JSON file; the plot beside it has the same stem.")] = Path(
        "runs/credit_race.json"
    ),
) -> None:
    """Read the cells of `runs` and the published ones, write JSON and plot, and print the tables."""
    cells = known_cells(runs, published)
    if not cells:
        raise typer.BadParameter(
            f"{runs} holds no finished cell: measure some first, `python -m benchmarks.race.race run`"
        )
    here = sum(cell["measured"] == "here" for cell in cells)
    if 0 < here < len(cells):
        typer.echo(f"{here} cells of {runs}, {len(cells) - here} published: seconds compare on one machine only")
    tables = {
        reward if until is None else f"{reward}, Flow-GRPO until iteration {until}": rounded(
            summarise(cells, reward, until)
        )
        for reward in REWARDS
        for until in (*EARLIER.get(reward, ()), None)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_as_json({"cells": cells, "tables": tables}), encoding="utf-8")
    write_plot(cells, out.with_suffix(".png"))
    for reward, rows in tables.items():
        if rows:
            goal = rows[0]["goal"]
            _print(
                f"{reward}: Flow-GRPO ends at {goal:.3f}",
                [{k: v for k, v in row.items() if k != "goal"} for row in rows],
            )


def _as_json(tree: Mapping[str, Any]) -> str:
    """Return JSON with a line for each cell and table, and numbers rounded to `DIGITS` decimals."""
    cells = ",\n".join(json.dumps(rounded(cell)) for cell in tree["cells"])
    others = ",\n".join(f"{json.dumps(name)}: {json.dumps(rounded(tree[name]))}" for name in tree if name != "cells")
    return f'{{"cells": [\n{cells}\n],\n{others}}}\n'


def rounded(value: Any) -> Any:
    """Return a tree of results with numbers rounded to `DIGITS` decimals."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def _print(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*rows[0], title=title, box=MARKDOWN)
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console(width=250).print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app()
