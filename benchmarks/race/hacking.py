"""Does a KL term keep what a hacked reward destroys? The trained reward against a score that only watches.

    python -m benchmarks.race.hacking run --iterations 40 --every 5
    python -m benchmarks.race.hacking report --out docs/results/hacking.json   # table, JSON, and a figure beside it

`stepwise_tree` trains redness, which is easily hacked: an image that is red all over scores best. GenEval has weight 0:
its strict score on held-out prompts is what hacking destroys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.race.race import Cell, run_cell
from deploy.folder.read import lines_of

METHOD = "stepwise_tree"
TRAINED, WATCHED = "evaluation/reward/redness", "evaluation/reward/geneval/strict"
RUNS = Path("runs/hacking")
REWARDS = (
    "rewards={redness: {scorer: 'benchmarks.scorers:Redness'},"
    " geneval: {scorer: geneval, weight: 0, args: {detector: 'toyworld.world.detector:ShapeDetector'}}}"
)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "no KL term": (),
    "KL term for all, 0.04": ("learner.kl.weight=0.04",),
    "KL term for all, 0.4": ("learner.kl.weight=0.4",),
    "NormGuard, 0.1": ("learner.norm_guard=0.1",),
    "GenEval is half of the reward": ("rewards.redness.weight=0.5", "rewards.geneval.weight=0.5"),
}
"""Config keys by variant."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Runs = Annotated[Path, typer.Option(help="Folder of the runs.")]


@app.command()
def run(
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of every variant.")] = 40,
    every: Annotated[int, typer.Option(min=1, help="Iterations between evaluations.")] = 5,
    runs: Runs = RUNS,
) -> None:
    """Train the variants one after the other; run the command again to continue."""
    cell = Cell(variant=METHOD, seed=0, reward="redness")
    for number, keys in enumerate(VARIANTS.values()):
        folder, extra = runs / str(number), (REWARDS, *keys)
        run_cell("toy_geneval", cell, folder, iterations=iterations, seconds=0.0, every=every, extra=extra)


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="JSON file; the figure is written beside it.")],
    runs: Runs = RUNS,
) -> None:
    """Write the curves and the figure, and print the table."""
    cell = Cell(variant=METHOD, seed=0, reward="redness")
    curves = {variant: _curve(runs / str(number) / cell.folder) for number, variant in enumerate(VARIANTS)}
    out.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    shared = sorted(set.intersection(*(set(curve["iteration"]) for curve in curves.values())))
    shown = shared[:: max(1, (len(shared) - 1) // 4)]
    table = Table("redness / strict GenEval at iteration", *map(str, shown), box=MARKDOWN)
    for variant, curve in curves.items():
        where = [curve["iteration"].index(iteration) for iteration in shown]
        table.add_row(variant, *(f"{curve['trained'][at]:.3f} / {curve['watched'][at]:.3f}" for at in where))
    Console(width=160).print(table)
    _draw(curves).savefig(out.with_suffix(".png"), dpi=100)


def _curve(folder: Path) -> dict[str, list[Any]]:
    lines = [line for line in lines_of(folder) if WATCHED in line]
    names = {"iteration": "iteration", "trained": TRAINED, "watched": WATCHED}
    return {name: [round(line[key], 5) for line in lines] for name, key in names.items()}


def _draw(curves: Mapping[str, Mapping[str, list[Any]]]) -> Figure:
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for variant, curve in curves.items():
        axes.plot(curve["trained"], curve["watched"], marker="o", markersize=3.5, linewidth=1.2, label=variant)
    axes.set_xlabel("held-out redness, which is trained")
    axes.set_ylabel("held-out strict GenEval score")
    axes.set_title("A point is an evaluation; up and to the right is better")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    app()
