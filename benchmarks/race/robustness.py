"""Does the winner of the race still win when the run is set up differently?

    python -m benchmarks.race.robustness run --reward redness --iterations 9    # resumable
    python -m benchmarks.race.robustness report --out docs/results/robustness.json # JSON, tables

A cell is one of the race (`benchmarks/race/race.py`) with the overrides of one setting: another number of steps,
schedule, guidance, group size or learning rate, or held-out prompts of kinds that no training prompt has. Every setting
has the same number of images in an iteration and the same evaluation. A table compares the variants of one setting at
equal iterations; scores of different settings do not compare where the setting changes the evaluation's images.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.race.race import Cell, read_cell, rounded, run_cell
from benchmarks.race.variants import REWARDS

RUNS = Path("runs/robustness")
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "robustness.json"
MOST_SEEDS = 9
VARIANTS = ("flow_grpo", "flow_grpo_fast", "stepwise_fast, tiny", "stepwise_tree")
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "preset": (),
    "T = 10": ("sampling.steps=10",),
    "T = 20": ("sampling.steps=20",),
    "schedule of SD3": ("sampling.schedule=model",),
    "guidance 3": ("model.guidance=3",),
    "groups of 8": ("group.size=8", "group.per_iteration=36"),
    "half the learning rate": ("learner.learning_rate=1e-3",),
    "twice the learning rate": ("learner.learning_rate=4e-3",),
    "other kinds of prompts": (),
}
"""Overrides of each setting. The race has T = 6, a linear schedule, no guidance, 12 groups of 24 and rate 2e-3."""
OTHER_KINDS = "other kinds of prompts"
HELD_OUT = ("colors", "position")
"""Tags of the held-out prompts of `OTHER_KINDS`; no training prompt has them."""


def overrides_of(setting: str, runs: Path) -> tuple[str, ...]:
    """Return the config overrides of a setting; its prompt file is written if it needs one of its own."""
    if setting != OTHER_KINDS:
        return SETTINGS[setting]
    import toyworld

    prompts = Path(toyworld.__file__).parent / "prompts" / "heldout.jsonl"
    kept = [line for line in prompts.read_text("utf-8").splitlines() if json.loads(line)["tag"] in HELD_OUT]
    # `data.tags` chooses training and held-out prompts alike; the verdict reads the tag of counting prompts only.
    lines = [json.dumps(json.loads(line) | {"tag": "single_object"}) for line in kept]
    path = (runs / "other_kinds.jsonl").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return (f"data.heldout={path}",)


def folder_of(setting: str, runs: Path) -> Path:
    """Return the folder that holds the cells of a setting."""
    return runs / setting.replace(" = ", "").replace(" ", "_")


def results(runs: Path, published: Path = PUBLISHED) -> list[dict[str, Any]]:
    """Return the curves of all cells, each with its setting; a cell of `runs` replaces the published one."""
    held = json.loads(published.read_text(encoding="utf-8"))["cells"]
    older = {(each["setting"], Cell(each["variant"], each["seed"], each["reward"])): each for each in held}
    cells = [
        (setting, Cell(variant, seed, reward))
        for reward in REWARDS
        for setting in SETTINGS
        for variant in VARIANTS
        for seed in range(MOST_SEEDS)
    ]
    kept = ("variant", "seed", "reward", "iterations", "seconds", "scores")
    found = []
    for setting, cell in cells:
        own = read_cell(cell, folder_of(setting, runs))
        curve = {"setting": setting, **{key: own[key] for key in kept}} if own else older.get((setting, cell))
        if curve:
            found.append(curve)
    return found


def table_of(cells: Sequence[Mapping[str, Any]], reward: str) -> list[dict[str, Any]]:
    """Return a row for each setting: the mean score of each variant at the last evaluation of all its cells."""
    rows = []
    for setting in SETTINGS:
        own = [cell for cell in cells if (cell["setting"], cell["reward"]) == (setting, reward)]
        if not own:
            continue
        last = max(set.intersection(*(set(cell["iterations"]) for cell in own)))
        row: dict[str, Any] = {"setting": setting, "iteration": last, "start": own[0]["scores"][0]}
        for variant in VARIANTS:
            scores = [cell["scores"][cell["iterations"].index(last)] for cell in own if cell["variant"] == variant]
            row[variant] = sum(scores) / len(scores) if scores else None
        rows.append(row)
    return rows


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Runs = Annotated[Path, typer.Option(help="Folder of the cells.")]


@app.command()
def run(
    reward: Annotated[list[str] | None, typer.Option(help="Rewards; by default redness.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Settings; by default all.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Variants; by default all.")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Least iterations of every cell.")] = 9,
    every: Annotated[int, typer.Option(min=1, help="Iterations between evaluations.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds of each cell.")] = 1,
    runs: Runs = RUNS,
) -> None:
    """Train the cells one after the other; run the command again to continue."""
    for kind, names, known in (
        ("reward", reward, REWARDS),
        ("setting", setting, SETTINGS),
        ("variant", only, VARIANTS),
    ):
        for name in names or []:
            if name not in known:
                raise typer.BadParameter(f"a {kind} must be one of {list(known)}, got {name!r}")
    cells = [
        (name, Cell(variant, seed, each))
        for seed in range(seeds)
        for each in reward or ["redness"]
        for name in setting or SETTINGS
        for variant in only or VARIANTS
    ]
    for number, (name, cell) in enumerate(cells, start=1):
        typer.echo(f"cell {number} of {len(cells)}: {name}, {cell.folder}")
        extra, folder = overrides_of(name, runs), folder_of(name, runs)
        run_cell("toy_geneval", cell, folder, iterations=iterations, seconds=0.0, every=every, extra=extra)


@app.command()
def report(
    runs: Runs = RUNS,
    published: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="JSON file of cells that were measured before.")
    ] = PUBLISHED,
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("runs/robustness.json"),
) -> None:
    """Write JSON of all cells, of `runs` and published, and print a table for each reward."""
    cells = results(runs, published)
    if not cells:
        raise typer.BadParameter(f"{runs} holds no finished cell: run `python -m benchmarks.race.robustness run` first")
    tables = {reward: rows for reward in REWARDS if (rows := table_of(cells, reward))}
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(rounded(cell)) for cell in cells)
    out.write_text(f'{{"cells": [\n{lines}\n]}}\n', encoding="utf-8")
    for reward, rows in tables.items():
        table = Table(*rows[0], title=reward, box=MARKDOWN)
        for row in rows:
            table.add_row(*(f"{each:.3f}" if isinstance(each, float) else str(each or "-") for each in row.values()))
        Console(width=200).print(table)


if __name__ == "__main__":
    app()
