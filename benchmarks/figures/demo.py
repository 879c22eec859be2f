"""The image of the README: the reward of the demo's seeds, and images of the median one before and after.

python -m benchmarks.figures.demo runs/demo_gain/seed_*
"""

import statistics
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deploy.folder.gallery import FAIL, PASS, read_gallery
from deploy.folder.names import GALLERY
from deploy.report.runs import HELDOUT, REWARD, read_run

ROWS = 3


def draw(runs: list[Path]) -> Figure:
    """Draw rewards and held-out scores of runs, and the first images of the run with the median last score."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1, 1.15]).flat
    axes = left.subplots()
    held = [read_run(run) for run in runs]
    for run in held:
        iterations, _, rewards = run.values(REWARD)
        at, _, scores = run.values(HELDOUT, of="evaluations")
        is_first = run is held[0]
        axes.plot(iterations, rewards, color="#2563eb", alpha=0.35, label="training reward" if is_first else None)
        axes.plot(at, scores, "o", color="#c2570c", markersize=5, label="held-out score" if is_first else None)
    mean = np.mean([run.values(REWARD)[2] for run in held], axis=0)
    axes.plot(held[0].values(REWARD)[0], mean, color="#2563eb", linewidth=2.2, label=f"mean of {len(held)} seeds")
    axes.set(xlabel="iteration", title=f"the demo, {len(held)} seeds")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    ends = [run.values(HELDOUT, of="evaluations")[2][-1] for run in held]
    middle = ends.index(statistics.median_low(ends))
    first, last = (int(held[middle].evaluations[end]["iteration"]) for end in (0, -1))
    before, after = (read_gallery(runs[middle] / GALLERY, each) for each in (first, last))
    prompts = [prompt for prompt in before if prompt in after][: 2 * ROWS]
    right.suptitle("seed with the median score before and after, same noise (green: right, red: wrong)", fontsize=10)
    for part, prompt in zip(right.subfigures(ROWS, 2).flat, prompts, strict=False):
        part.suptitle(prompt, fontsize=8)
        for panel, (image, score) in zip(part.subplots(1, 2), (before[prompt], after[prompt]), strict=True):
            panel.imshow(image, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set(color=PASS if score >= 1 else FAIL, linewidth=2.5)
    return figure


def main(
    runs: Annotated[list[Path], typer.Argument(help="Run folders of the demo, one for each seed.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("docs/demo.png"),
) -> None:
    """Write the image."""
    figure = draw(runs)
    FigureCanvasAgg(figure)
    figure.savefig(out, dpi=120)
    typer.echo(out)


if __name__ == "__main__":
    typer.run(main)
