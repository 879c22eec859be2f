"""Does a KL term keep what a hacked reward destroys? The trained reward against a score that only watches.

    python -m benchmarks.race.hacking run --iterations 40 --every 5
    python -m benchmarks.race.hacking report --out docs/results/hacking.json   # table, JSON, and a figure beside it

`stepwise_tree` trains redness, which is easily hacked: an image that is red all over scores best. GenEval has weight 0:
its strict score on held-out prompts is what hacking destroys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.output import show, write_json
from benchmarks.race.cell import Cell, evaluations, rounded, run_cell

CELL = Cell("stepwise_tree", 0, "redness")
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
    for number, keys in enumerate(VARIANTS.values()):
        run_cell(CELL, runs / str(number), iterations=iterations, every=every, extra=(REWARDS, *keys))


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="JSON file; the figure is written beside it.")],
    runs: Runs = RUNS,
) -> None:
    """Write the curves and the figure, and print the table."""
    columns = {"iteration": "iteration", "trained": TRAINED, "watched": WATCHED}
    curves = {
        variant: rounded(evaluations(runs / str(number) / CELL.folder, **columns))
        for number, variant in enumerate(VARIANTS)
    }
    write_json(out, curves)
    shared = sorted(set.intersection(*(set(curve["iteration"]) for curve in curves.values())))
    shown = shared[:: max(1, (len(shared) - 1) // 4)]
    rows = []
    for variant, curve in curves.items():
        points = dict(zip(curve["iteration"], zip(curve["trained"], curve["watched"], strict=True), strict=True))
        pairs = {str(at): " / ".join(f"{score:.3f}" for score in points[at]) for at in shown}
        rows.append({"redness / strict GenEval at iteration": variant, **pairs})
    show(rows)
    _draw(curves).savefig(out.with_suffix(".png"), dpi=100)


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
