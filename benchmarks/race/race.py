"""Methods and changes of them as they are, without tuning: every variant on the same preset, prompts and seeds.

    python -m benchmarks.race.race run --reward geneval --iterations 30 --every 10 --only dense_grpo   # resumable
    python -m benchmarks.race.race report                                # a table for each reward that was trained

`benchmarks/race/variants.py` lists variants and rewards. Learning rate and clip range are the preset's for every
variant, and the KL term and the running mean are off. Seconds are CPU seconds of the cell's one process with one
thread, of generating, scoring and learning.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.clock import cpu_clock
from benchmarks.output import show
from benchmarks.race.cell import (
    Cell,
    arrival,
    cells_in,
    deepest_fall,
    mean_curve,
    read_cell,
    require_known,
    run_cell,
    seconds_an_iteration,
)
from benchmarks.race.variants import REWARDS, VARIANTS

RUNS = Path("runs/credit_race")
PEER = "flow_grpo"
"""Its mean score at the end is the goal."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Runs = Annotated[Path, typer.Option(help="Folder of the cells.")]


@app.command()
def run(
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides of every cell.")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of every cell.")] = 60,
    every: Annotated[int, typer.Option(min=1, help="Iterations between evaluations.")] = 10,
    only: Annotated[list[str] | None, typer.Option(help="Variants; by default all.")] = None,
    reward: Annotated[list[str] | None, typer.Option(help="Rewards; by default all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 1,
    runs: Runs = RUNS,
) -> None:
    """Train the cells one after the other; run the command again to continue."""
    names, rewards = only or list(VARIANTS), reward or list(REWARDS)
    require_known("variant", names, VARIANTS)
    require_known("reward", rewards, REWARDS)
    with cpu_clock():
        for cell in [Cell(name, seed, each) for seed in range(seeds) for each in rewards for name in names]:
            typer.echo(cell.folder)
            run_cell(cell, runs, iterations=iterations, every=every, extra=overrides or ())


@app.command()
def report(runs: Runs = RUNS) -> None:
    """Print a row for each variant: means over its seeds at the evaluations that all of them have."""
    read = [(read_cell(cell, runs), runs / cell.folder) for cell in cells_in(runs)]
    curves: list[dict[str, Any]] = [
        {**curve, "pace": seconds_an_iteration(folder)} for curve, folder in read if len(curve["scores"]) > 1
    ]
    if not curves:
        raise typer.BadParameter(f"{runs} holds no finished cell: run `python -m benchmarks.race.race run` first")
    for reward in dict.fromkeys(curve["reward"] for curve in curves):
        show(rows_of([curve for curve in curves if curve["reward"] == reward]), title=reward)


def rows_of(curves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of one reward's table."""
    members = {name: [each for each in curves if each["variant"] == name] for name in VARIANTS}
    means = {name: mean_curve(own, ("scores",)) for name, own in members.items() if own}
    goal = means[PEER]["scores"][-1] if PEER in means else math.inf
    return [
        {
            "variant": name,
            "seeds": len(members[name]),
            "seconds an iteration": min(each["pace"] for each in members[name]),
            "iteration: score": [f"{at}: {score:.3f}" for at, score in zip(*mean.values(), strict=True)],
            f"iterations to {PEER}'s end": arrival(mean["iterations"], mean["scores"], goal),
            "deepest fall": statistics.fmean(deepest_fall(each["scores"]) for each in members[name]),
        }
        for name, mean in means.items()
    ]


if __name__ == "__main__":
    app()
