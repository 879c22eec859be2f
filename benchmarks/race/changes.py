"""One change of `stepwise_tree` at a time: why does its score fall between two evaluations, and what does NormGuard do?

    python -m benchmarks.race.changes run                                       # resumable
    python -m benchmarks.race.changes report --out docs/results/changes.json    # table and JSON

Every evaluation has the same prompts and noise. The images of each prompt are split into two halves: what both halves
show is a change of the policy; by what the halves differ is the noise of the images.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float

from benchmarks.clock import cpu_clock
from benchmarks.output import show, write_json
from benchmarks.race.cell import Cell, require_known, rounded, run_cell
from benchmarks.race.finals import SECOND
from benchmarks.race.variants import MEAN
from deploy.folder.heldout import HeldoutScores, read_heldout
from deploy.folder.read import lines_of

RUNS = Path("runs/race_changes")
CELL = Cell("stepwise_tree", 7, "geneval")
RATIO = "train/velocity_norm_ratio_mean"
ITERATIONS, EVERY, IMAGES = 24, 3, 12
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "as raced": ("learner.norm_guard=1e-9",),  # so little only shows the ratio of the norms
    **{f"NormGuard {weight}": (f"learner.norm_guard={weight}",) for weight in (0.1, 0.3, 0.03)},
    "half the learning rate": ("learner.learning_rate=1e-3",),
    "one update an iteration": ("learner.updates_per_iteration=1",),
    "24 groups": ("group.per_iteration=24",),
    "a running mean is evaluated": MEAN,
    "groups of 36": ("group.size=36",),
    "stepwise_fast": ("method=stepwise_fast",),
    **{f"NormGuard {weight}": (f"learner.norm_guard={weight}",) for weight in (0.01, 0.003)},
    "groups of 36, norms watched": ("group.size=36", "learner.norm_guard=1e-9"),
}
"""Config keys by variant, in the order of their folders. The race has 12 groups of 24, two updates, the rate 2e-3."""


def halves_of(evaluations: Sequence[HeldoutScores]) -> Float[np.ndarray, "2 E"]:
    """Return the score of every evaluation by each half of the images: the mean over the kinds of prompts."""
    tables = np.stack([each.table() for each in evaluations])
    tags = np.array(evaluations[0].tags)
    halves = tables[..., 0::2], tables[..., 1::2]
    return np.array([np.mean([half[:, tags == tag].mean((1, 2)) for tag in set(tags)], axis=0) for half in halves])


def row_of(evaluations: Sequence[HeldoutScores], lines: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the figures of one run: its scores, its deepest fall, and how much of its changes is noise.

    The half-difference of the two halves' changes has the std of the whole change's noise.
    """
    ratios = [line[RATIO] for line in lines if RATIO in line]
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
        "second_scorer": float(evaluations[-1].table("second").mean()),
        "velocity_norm_ratio": ratios[-1] if ratios else None,
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
    require_known("variant", only or (), VARIANTS)
    with cpu_clock():
        for number, (name, keys) in enumerate(VARIANTS.items()):
            if not only or name in only:
                extra = (f"evaluation.images_per_prompt={IMAGES}", *SECOND["geneval"][0], *keys)
                run_cell(CELL, runs / str(number), iterations=ITERATIONS, every=EVERY, extra=extra)


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="JSON file.")],
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = RUNS,
) -> None:
    """Write the figures of all runs that have ended, and print the table."""
    folders = {name: runs / str(at) / CELL.folder for at, name in enumerate(VARIANTS)}
    found = {name: read_heldout(folder) for name, folder in folders.items()}
    ended = {name: each for name, each in found.items() if each and each[-1].iteration == ITERATIONS}
    rows = {name: row_of(each, lines_of(folders[name])) for name, each in ended.items()}
    write_json(out, rounded(rows))
    curves = ("iterations", "scores")
    show([{"variant": name, **{k: v for k, v in row.items() if k not in curves}} for name, row in rows.items()])


if __name__ == "__main__":
    app()
