"""Why does the score of `stepwise_tree` fall between two evaluations? One thing changed at a time, evaluated often.

    python -m benchmarks.race.steadiness run                                          # resumable
    python -m benchmarks.race.steadiness report --out docs/results/steadiness.json    # table and JSON

Every evaluation has the same prompts and noise. The images of each prompt are split into two halves: what both halves
show is a change of the policy; by what the halves differ is the noise of the images.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.clock import cpu_clock
from benchmarks.race.race import Cell, rounded, run_cell
from benchmarks.race.variants import MEAN
from deploy.folder.heldout import HeldoutScores, read_heldout
from protocol.ground.files import write_whole

RUNS = Path("runs/steadiness")
CELL = Cell("stepwise_tree", 7, "geneval")
ITERATIONS, EVERY, IMAGES = 24, 3, 12
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "as raced": (),
    "half the learning rate": ("learner.learning_rate=1e-3",),
    "one update an iteration": ("learner.updates_per_iteration=1",),
    "24 groups": ("group.per_iteration=24",),
    "a running mean is evaluated": MEAN,
    "groups of 36": ("group.size=36",),
    "plain images, not pairs: stepwise_fast": ("method=stepwise_fast",),
}
"""Config keys by variant. The race has 12 groups of 24, two updates and the rate 2e-3."""


def halves_of(evaluations: Sequence[HeldoutScores]) -> Float[np.ndarray, "2 E"]:
    """Return the score of every evaluation by each half of the images: the mean over the kinds of prompts."""
    tables = np.stack([each.table() for each in evaluations])
    tags = np.array(evaluations[0].tags)
    halves = tables[..., 0::2], tables[..., 1::2]
    return np.array([np.mean([half[:, tags == tag].mean((1, 2)) for tag in set(tags)], axis=0) for half in halves])


def row_of(evaluations: Sequence[HeldoutScores]) -> dict[str, Any]:
    """Return the figures of one run: its scores, its deepest fall, and how much of its changes is noise.

    The half-difference of the two halves' changes has the std of the whole change's noise.
    """
    halves = halves_of(evaluations)
    scores = halves.mean(0)
    peaks = np.maximum.accumulate(scores)
    low = int(np.argmax(peaks - scores))
    high = int(np.argmax(scores[: low + 1]))
    return {
        "iterations": [each.iteration for each in evaluations],
        "scores": scores.tolist(),
        "end": float(scores[-1]),
        "last_three": float(scores[-3:].mean()),
        "deepest_fall": float(scores[high] - scores[low]),
        "in_each_half": (halves[:, high] - halves[:, low]).tolist(),
        "std_of_changes": float(np.diff(scores).std()),
        "std_of_their_noise": float(np.sqrt(np.mean(np.square(np.diff(halves[0] - halves[1]) / 2)))),
    }


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(
    only: Annotated[list[str] | None, typer.Option(help="Variants; by default all.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = RUNS,
) -> None:
    """Train the variants one after the other; run the command again to continue."""
    for name in only or ():
        if name not in VARIANTS:
            raise typer.BadParameter(f"a variant must be one of {list(VARIANTS)}, got {name!r}")
    with cpu_clock():
        for number, (name, keys) in enumerate(VARIANTS.items()):
            if not only or name in only:
                extra = (f"evaluation.images_per_prompt={IMAGES}", *keys)
                run_cell(
                    "toy_geneval",
                    CELL,
                    runs / str(number),
                    iterations=ITERATIONS,
                    seconds=0.0,
                    every=EVERY,
                    extra=extra,
                )


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="JSON file.")],
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = RUNS,
) -> None:
    """Write the figures of all runs, and print the table."""
    found = {name: read_heldout(runs / str(at) / CELL.folder) for at, name in enumerate(VARIANTS)}
    rows = {name: row_of(evaluations) for name, evaluations in found.items() if len(evaluations) > 1}
    write_whole(out, json.dumps(rounded(rows), indent=1) + "\n")
    shown = ("end", "last_three", "deepest_fall", "in_each_half", "std_of_changes", "std_of_their_noise")
    table = Table("variant", *(name.replace("_", " ") for name in shown), box=MARKDOWN)
    for name, row in rows.items():
        values = [row[key] for key in shown]
        table.add_row(name, *(", ".join(f"{x:.3f}" for x in np.atleast_1d(value)) for value in values))
    Console(width=160).print(table)


if __name__ == "__main__":
    app()
