"""Charts of a report: as SVG within a page, in the colours of the page's light or dark scheme, and as PNG."""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deploy.monitor.summary import STEP_REWARD
from deploy.report.runs import SeedGroup

COLOURS = 8


def _scheme(ink: str, line: str, *cycle: str) -> dict[str, str]:
    return {"ink": ink, "line": line} | {f"c{number}": each for number, each in enumerate(cycle)}


LIGHT = _scheme(
    "#16181d", "#dfe3ea", "#2563eb", "#c2570c", "#0f766e", "#9333ea", "#be123c", "#52606d", "#8a6d00", "#0891b2"
)
"""Colours of a PNG, and of a page in its light scheme."""
DARK = _scheme(
    "#e8eaef", "#2c313a", "#60a5fa", "#fb923c", "#2dd4bf", "#c084fc", "#fb7185", "#94a3b8", "#facc15", "#67e8f9"
)
THEMED = {name: f"#0a0b{number:02x}" for number, name in enumerate(LIGHT)}
"""Placeholders in an SVG, which are replaced by the page's colour variables."""
DASHES = ("-", "--", ":", "-.")
LABEL = 18
"""Most characters of a row's label."""
MOST_POINTS = 400
"""Most points of a line; a longer run is drawn as means of equal parts."""
SIZE = (5.2, 3.1)
"""Width and height in inches; a text of 10 points is 10 pixels high in a chart that is 400 pixels wide."""
HEAT = LinearSegmentedColormap.from_list("heat", ["#2d1160", "#7b1fa2", "#d03b6d", "#f58a3c", "#fbe471"])
"""The colour map of the run's page: dark violet to bright yellow."""
HEAT_COLUMNS = 120
BARS = 20
"""Most bars of one side."""
DPI = 200
Series = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Chart:
    """A chart that can be drawn in any colours."""

    title: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = SIZE

    @property
    def svg(self) -> str:
        """Draw the chart as an SVG element of a page."""
        return _inline(self._saved(THEMED, format="svg", metadata={"Date": None}).decode(), self.title)

    @property
    def png(self) -> bytes:
        """Draw the chart as a PNG in light colours, with its title."""
        return self._saved(LIGHT, format="png", dpi=DPI, facecolor="white")

    def _saved(self, colours: Mapping[str, str], **how: Any) -> bytes:
        with rc_context(_rc(colours)):
            figure = Figure(figsize=self.size, layout="constrained")
            FigureCanvasBase(figure)
            if how["format"] == "png":
                figure.suptitle(self.title, fontsize=10)
            self.draw(figure.subplots())
            out = io.BytesIO()
            figure.savefig(out, **how)
            return out.getvalue()


def colour(index: int) -> str:
    """Return the name of the colour of a group or a step; the colours repeat after eight."""
    return f"c{index % COLOURS}"


def dash(index: int) -> str:
    """Return the dash style of a group's or a step's line, which distinguishes lines of the same colour."""
    return DASHES[index // COLOURS % len(DASHES)]


def metric_chart(
    groups: Sequence[SeedGroup], name: str, *, of: str = "iterations", by: str = "iteration"
) -> Chart | None:
    """Draw a metric of all groups: a thin line per run, a thick line for their mean, a band from lowest to highest.

    Args:
        of: `iterations` or `evaluations`.
        by: `iteration` or `seconds`.

    Returns:
        The chart; None if no run has the metric.
    """
    drawn = [(index, group, group.values(name, of=of)) for index, group in enumerate(groups)]
    if not any(runs for _, _, runs in drawn):
        return None

    def draw(axes: Axes) -> None:
        for index, group, runs in drawn:
            if runs:
                series = [(run[0 if by == "iteration" else 1], run[2]) for run in runs]
                hidden = "\u200b" if group.label.startswith("_") else ""  # a legend leaves such labels out
                _band(axes, series, index, label=hidden + group.label, has_marks=of == "evaluations")
        axes.set_xlabel("iteration" if by == "iteration" else "training seconds")
        _finish(axes)

    return Chart(f"{name} by {by}", draw)


def step_reward_lines(group: SeedGroup) -> Chart | None:
    """Draw the mean absolute step reward of each step by iteration; None if no run has any."""
    sizes = _step_rewards(group)
    if not sizes:
        return None

    def draw(axes: Axes) -> None:
        for index, (step, runs) in enumerate(sizes.items()):
            x, mean, _, _ = banded(runs)
            axes.plot(
                x,
                mean,
                color=_cycled(index),
                linestyle=dash(index),
                linewidth=1.6,
                label=f"step {step}: {mean[-1]:.3g}",
                **_marks(x),
            )
        axes.set_xlabel("iteration")
        _finish(axes)

    return Chart(f"mean absolute step reward, {group.name}", draw)


def step_reward_heat(group: SeedGroup) -> Chart | None:
    """Draw the mean absolute step rewards as a map, steps by iterations, brighter for more; None if no run has any."""
    sizes = _step_rewards(group)
    if not sizes:
        return None
    steps, rows = list(sizes), [banded(runs, most=HEAT_COLUMNS)[:2] for runs in sizes.values()]
    ticks = np.unique(np.concatenate([x for x, _ in rows]))
    table = np.full((len(steps), len(ticks)), np.nan)
    for row, (x, mean) in zip(table, rows, strict=True):
        row[np.searchsorted(ticks, x)] = mean

    def draw(axes: Axes) -> None:
        edges = [ticks[0] - 0.5, *((a + b) / 2 for a, b in pairwise(ticks)), ticks[-1] + 0.5]
        mesh = axes.pcolormesh(edges, np.arange(len(steps) + 1), table, cmap=HEAT, vmin=0, rasterized=True)
        every = -(-len(steps) // 14)
        axes.set_yticks(np.arange(len(steps))[::every] + 0.5, [str(step) for step in steps[::every]])
        axes.invert_yaxis()
        axes.set(xlabel="iteration", ylabel="denoising step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02)
        bar.outline.set_visible(False)

    return Chart(f"mean absolute step reward, as a map, {group.name}", draw)


def stage_bars(rows: Sequence[tuple[str, dict[str, float]]]) -> Chart:
    """Draw stacked bars of seconds: one bar for each row, with one part for each stage."""
    stages = list(dict.fromkeys(stage for _, seconds in rows for stage in seconds))

    def draw(axes: Axes) -> None:
        left = np.zeros(len(rows))
        for index, stage in enumerate(stages):
            widths = np.array([seconds.get(stage, 0.0) for _, seconds in rows])
            axes.barh(np.arange(len(rows)), widths, left=left, color=_cycled(index), label=stage.replace("_", " "))
            left += widths
        axes.set_yticks(np.arange(len(rows)), [_short(label) for label, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("mean seconds per iteration")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1.2)
        axes.grid(axis="x")

    return Chart("where the time went", draw, (5.2, 1.5 + 0.45 * len(rows)))


def side_bars(group: SeedGroup, sides: Mapping[str, Sequence[str]]) -> Chart | None:
    """Draw the seconds of each side's work over the iterations: one bar per side, its parts stacked.

    Args:
        group: the runs; seconds are means over them and, for a long run, over spans of iterations.
        sides: the parts of each side, see `deploy.report.account.SIDES`.

    Returns:
        The chart; None if no run has the metrics.
    """
    found = [
        {part: runs for part in parts if (runs := group.values(f"work/{part}_seconds"))} for parts in sides.values()
    ]
    columns = [run for parts in found for runs in parts.values() for run in runs]
    if not columns:
        return None
    first, last = (int(which(run[0][at] for run in columns)) for which, at in ((min, 0), (max, -1)))
    span = -(-(last - first + 1) // BARS)
    starts = np.arange(first, last + 1, span)

    def draw(axes: Axes) -> None:
        width, drawn = 0.9 * span / len(sides), 0
        for side, parts in enumerate(found):
            below = np.zeros(len(starts))
            for part, runs in parts.items():
                seconds = _means([(run[0], run[2]) for run in runs], starts, span)
                left = starts - 0.45 * span + (span - 1) / 2 + side * width
                axes.bar(left, seconds, width, bottom=below, align="edge", color=_cycled(drawn), label=part)
                below, drawn = below + seconds, drawn + 1
        axes.set(xlabel="iteration", ylabel="seconds")
        _finish(axes)

    return Chart(f"seconds of each side, {group.name}", draw)


def _means(runs: Sequence[Series], starts: np.ndarray, span: int) -> np.ndarray:
    """Return the mean of the values in the `span` iterations from each start, over all runs; 0 if there are none."""
    at, values = (np.concatenate(each) for each in zip(*runs, strict=True))
    inside = [values[(at >= start) & (at < start + span)] for start in starts]
    return np.array([each.mean() if len(each) else 0.0 for each in inside])


def _step_rewards(group: SeedGroup) -> dict[int, list[Series]]:
    """Return iterations and mean absolute step rewards of each run, by the denoising steps that have them."""
    found = {
        int(match[1]): match[0] for name in group.names("step_reward/step_") if (match := STEP_REWARD.fullmatch(name))
    }
    sizes = {step: [(run[0], run[2]) for run in group.values(name)] for step, name in sorted(found.items())}
    return {step: runs for step, runs in sizes.items() if runs}


def banded(runs: Sequence[Series], *, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Join the series of several runs.

    Args:
        runs: x, ascending, and y of each run, [L].
        most: most points of a series; longer series are replaced by the means of equal parts.

    Returns:
        x within the range that all runs share, and the mean, the lowest and the highest y there; between its points, a
        run is interpolated linearly.
    """
    thinned = [_thinned(x, y, most) for x, y in runs]
    begin, end = max(x[0] for x, _ in thinned), min(x[-1] for x, _ in thinned)
    x = np.unique(np.concatenate([x for x, _ in thinned]))
    if begin <= end:
        x = x[(x >= begin) & (x <= end)]
    y = np.stack([np.interp(x, *series) for series in thinned])
    return x, y.mean(0), y.min(0), y.max(0)


def _band(axes: Axes, runs: Sequence[Series], index: int, *, label: str, has_marks: bool) -> None:
    x, mean, low, high = banded(runs)
    marks = _marks(x, always=has_marks)
    shown = f"{label}: {np.mean([y[-1] for _, y in runs]):.3g}"
    axes.plot(x, mean, color=_cycled(index), linestyle=dash(index), linewidth=1.8, label=shown, **marks)
    if len(runs) > 1:
        for series in runs:
            axes.plot(*_thinned(*series, MOST_POINTS), color=_cycled(index), linewidth=0.7, alpha=0.45)
        axes.fill_between(x, low, high, color=_cycled(index), alpha=0.18, linewidth=0)


def _marks(x: np.ndarray, *, always: bool = False) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.5} if always or len(x) < 2 else {}


def _thinned(x: np.ndarray, y: np.ndarray, most: int) -> Series:
    if len(x) <= most:
        return x, y
    parts = np.array_split(np.arange(len(x)), most)
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def _finish(axes: Axes) -> None:
    axes.grid(axis="y")
    drawn = [line.get_xdata() for line in axes.lines]
    if drawn and len(points := np.unique(np.concatenate(drawn))) == 1:
        axes.set_xlim(points[0] - 1, points[0] + 1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    labels = axes.get_legend_handles_labels()[1]
    columns = 3 if max(map(len, labels), default=0) < 16 else 1
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, handlelength=1.6)


def _cycled(index: int) -> str:
    """Return matplotlib's name of a colour of the cycle, which it looks up when the chart is drawn."""
    return f"C{index % COLOURS}"


def _rc(colours: Mapping[str, str]) -> dict[Any, Any]:
    ink, line = colours["ink"], colours["line"]
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "flowcredit",
        "font.size": 10,
        "text.color": ink,
        "text.parse_math": False,
        "axes.edgecolor": line,
        "axes.labelcolor": ink,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.prop_cycle": cycler(color=[colours[colour(index)] for index in range(COLOURS)]),
        "figure.facecolor": "none",
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": line,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 9,
    }


def _inline(svg: str, title: str) -> str:
    """Turn an SVG file into an element of a page: unique ids, the page's colours, no metadata, no size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style|title)\b.*?</\1>", "", svg, flags=re.DOTALL)
    own, label = re.sub(r"\W+", "-", title), html.escape(title).replace("\\", "")
    svg = re.sub(r'\bid="', f'id="{own}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{own}-", svg)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{label}">', svg, count=1
    )
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    for name, drawn in THEMED.items():
        svg = svg.replace(drawn, f"var(--{name})")
    return svg


def _short(text: str) -> str:
    return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"
