"""The plot of a race, made from the cells of its JSON file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Cells = Sequence[Mapping[str, Any]]


def write_plot(cells: Cells, path: Path, shown: Sequence[str]) -> None:
    """Plot a row for each reward: held-out score over iterations and over seconds, and mean diversity over mean score.

    Args:
        cells: the curves; those over a clock have a band over the seeds.
        path: the image's.
        shown: variants, the baseline first; those without a cell are left out.
    """
    rewards = list(dict.fromkeys(cell["reward"] for cell in cells))
    figure = Figure(figsize=(18, 3.6 * len(rewards)), layout="constrained")
    axes = figure.subplots(len(rewards), 3, squeeze=False)
    for row, reward in zip(axes, rewards, strict=True):
        for index, variant in enumerate(shown):
            own = [cell for cell in cells if (cell["variant"], cell["reward"]) == (variant, reward)]
            if own:
                _band(row[0], own, "iterations", label=f"{variant} ({len(own)})", color=f"C{index % 10}")
                _band(row[1], own, "seconds", label=variant, color=f"C{index % 10}")
                scores, diversity = (np.mean([each[what] for each in own], axis=0) for what in ("scores", "diversity"))
                row[2].plot(scores, diversity, marker=".", color=f"C{index % 10}")
        row[0].set(xlabel="iteration", ylabel=f"held-out score ({reward})")
        row[1].set(xlabel="training seconds", ylabel=f"held-out score ({reward})")
        row[2].set(xlabel=f"held-out score ({reward})", ylabel="diversity")
        row[-1].legend(*row[0].get_legend_handles_labels(), fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=80)


def _band(axes: Axes, own: Cells, what: str, *, label: str, color: str) -> None:
    end = min(each[what][-1] for each in own)
    grid = np.linspace(0, end, 50) if what == "seconds" else np.array([i for i in own[0][what] if i <= end], float)
    curves = np.stack([np.interp(grid, each[what], each["scores"]) for each in own])
    axes.plot(grid, curves.mean(0), label=label, color=color)
    if len(own) > 1:
        axes.fill_between(grid, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
