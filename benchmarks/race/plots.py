"""Plots of the credit race, made from the cells of its JSON file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Cells = Sequence[Mapping[str, Any]]

FIGURES: Mapping[str, tuple[str, ...]] = {
    "clock": (
        "flow_grpo", "flow_grpo_fast", "stepwise_calibrated", "stepwise_fast, tiny", "stepwise_fast", "stepwise_tree",
        "diffusion_nft", "awm",
    ),
    "tails": (
        "flow_grpo", "flow_grpo_fast", "stepwise_fast", "stepwise_fast, two steps", "stepwise_fast, short tail",
        "stepwise_fast, two steps, short tail",
    ),
    "windows": ("flow_grpo", "stepwise_fast", "stepwise_fast, spread", "stepwise_fast, sliding"),
    "trees": (
        "flow_grpo", "flow_grpo_fast", "stepwise_fast", "diffusion_nft", "stepwise_tree", "stepwise_tree, groups of 32",
        "stepwise_tree, spread", "stepwise_tree, per step, short tail",
    ),
}  # fmt: skip
"""Variants of each figure, the baseline first; variants without a cell are left out."""


def write_plots(cells: Cells, out: Path) -> list[Path]:
    """Write `<out>_<figure>.png` with the curves."""
    paths = []
    rewards = list(dict.fromkeys(cell["reward"] for cell in cells))
    for name, variants in FIGURES.items():
        if any(cell["variant"] in variants[1:] for cell in cells):
            paths.append(curves(cells, rewards, variants, out.with_name(f"{out.stem}_{name}.png")))
    return paths


def curves(cells: Cells, rewards: Sequence[str], variants: Sequence[str], path: Path) -> Path:
    """Plot a row for each reward: held-out score over iterations and over seconds, with a band over the seeds."""
    rewards = [name for name in rewards if any(c["reward"] == name and c["variant"] in variants[1:] for c in cells)]
    figure = Figure(figsize=(13, 3.6 * len(rewards)), layout="constrained")
    axes = figure.subplots(len(rewards), 2, squeeze=False)
    for row, reward in zip(axes, rewards, strict=True):
        for index, variant in enumerate(variants):
            own = [cell for cell in cells if (cell["variant"], cell["reward"]) == (variant, reward)]
            if own:
                style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
                _band(row[0], own, "iterations", label=f"{variant} ({len(own)})", style=style)
                _band(row[1], own, "seconds", label=variant, style=style)
        row[0].set(xlabel="iteration", ylabel=f"held-out score ({reward})")
        row[1].set(xlabel="training seconds")
        row[1].legend(*row[0].get_legend_handles_labels(), fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _save(figure, path)


def _band(axes: Axes, own: Cells, what: str, *, label: str, style: Mapping[str, str]) -> None:
    end = min(each[what][-1] for each in own)
    grid = np.linspace(0, end, 50) if what == "seconds" else np.array([i for i in own[0][what] if i <= end], float)
    curves = np.stack([np.interp(grid, each[what], each["scores"]) for each in own])
    axes.plot(grid, curves.mean(0), label=label, color=style["color"], linestyle=style["linestyle"])
    if len(own) > 1:
        axes.fill_between(grid, curves.min(0), curves.max(0), color=style["color"], alpha=0.15, linewidth=0)


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
    return path
