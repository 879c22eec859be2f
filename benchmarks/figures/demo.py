"""The image of the README: score and reward of the demo, and an image of each held-out prompt before and after.

make demo
python -m benchmarks.figures.demo runs/demo-*
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure

from deploy.folder.gallery import FAIL, PASS, GalleryImage, before_after_text, read_gallery
from deploy.folder.names import GALLERY
from deploy.report.runs import HELDOUT, REWARD, Run, read_run

COLUMNS = 8
WIDE, HIGH, BAR = 1.12, 1.3, 0.12
"""Size of a cell and height of its bar; an image is 1 wide and high."""


def draw(runs: list[Path]) -> Figure:
    """Draw the curves of all runs, and the images of the run with the median last score."""
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1, 2.4]).flat
    held = [read_run(run) for run in runs]
    _curves(left, held)
    ends = [run.values(HELDOUT, of="evaluations")[2][-1] for run in held]
    middle = held[ends.index(statistics.median_low(ends))]
    first, last = (int(middle.evaluations[end]["iteration"]) for end in (0, -1))
    before, after = (read_gallery(middle.path / GALLERY, each) for each in (first, last))
    prompts = [prompt for prompt in before if prompt in after]
    scores = [[before[prompt].reading, after[prompt].reading] for prompt in prompts]
    said = before_after_text(middle.heldout, scores, first=first, last=last, diversity=middle.config.diversity_reading)
    right.suptitle(said, fontsize=9)
    images = middle.config.evaluation.images_per_prompt
    right.supxlabel(
        f"the first image of each held-out prompt; green: the share of the prompt's {images} images that are right",
        fontsize=8,
    )
    for axes, shown, iteration in zip(right.subplots(1, 2), (before, after), (first, last), strict=True):
        _sheet(axes, [shown[prompt] for prompt in prompts])
        axes.set_title(f"iteration {iteration}", fontsize=9)
    return figure


def _curves(part: SubFigure, runs: Sequence[Run]) -> None:
    score, reward = part.subplots(2, 1, sharex=True)
    for axes, name, of, title in (
        (score, HELDOUT, "evaluations", "held-out score, GenEval's strict verdict"),
        (reward, REWARD, "iterations", "training reward, on a softer scale"),
    ):
        columns = [run.values(name, of=of) for run in runs]
        for iterations, _, values in columns:
            axes.plot(iterations, values, "o-" if of == "evaluations" else "-", color="#2563eb", markersize=4)
        axes.set_title(title, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    reward.set_xlabel("iteration")


def _sheet(axes: Axes, cells: Sequence[GalleryImage]) -> None:
    """Draw images with a bar below each: green up to its score, from 0 to 1, and red after it."""
    for number, (image, score, *_) in enumerate(cells):
        x, y = WIDE * (number % COLUMNS), HIGH * (number // COLUMNS)
        axes.imshow(image, interpolation="nearest", extent=(x, x + 1, y + 1, y))
        axes.barh([y + 1 + BAR], [score], BAR, x, color=PASS)
        axes.barh([y + 1 + BAR], [1 - score], BAR, x + score, color=FAIL)
    axes.set(xlim=(0, COLUMNS * WIDE), ylim=(-(-len(cells) // COLUMNS) * HIGH, 0), aspect="equal")
    axes.set_axis_off()


def main(
    runs: Annotated[list[Path], typer.Argument(help="Run folders of the demo.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("docs/demo.png"),
) -> None:
    """Write the image."""
    figure = draw(runs)
    FigureCanvasAgg(figure)
    figure.savefig(out, dpi=130)
    typer.echo(out)


if __name__ == "__main__":
    typer.run(main)
