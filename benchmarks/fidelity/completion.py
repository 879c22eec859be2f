"""How well cheap completions rank points: the rank correlation of their scores with those of an expensive completion.

    python -m benchmarks.fidelity.completion toy_geneval group.size=24 method=stepwise_calibrated --prompts 12

The base model generates one group for each prompt, and every point is completed in every way. Spearman's correlation is
computed over the members at one point of one prompt, and averaged over points and prompts. A point whose reference
scores are all equal is left out, since they rank nothing. A completion whose scores are all equal at another point
counts as 0 there. There are two references: the remaining schedule, and the ODE in 64 second-order substeps. `forwards`
is the number of velocity evaluations of one point, without that of the main pass, averaged over points.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from rich.progress import track
from scipy.stats import spearmanr

from benchmarks.fidelity.groups import World, draw_group
from benchmarks.output import show, write_json
from protocol.config.sampling import CompletionConfig
from protocol.messages import Prompt

Solver = Literal["euler", "heun", "adams"]
Spacing = Literal["even", "schedule"]
SOLVED: dict[Solver, dict[Spacing, tuple[int, ...]]] = {
    "euler": {"even": (2, 3, 5, 8), "schedule": (2, 3, 5)},
    "adams": {"even": (2, 3, 5, 8), "schedule": (2, 3, 5)},
    "heun": {"even": (2, 3)},
}
TAPERED: dict[Solver, tuple[int, ...]] = {"euler": (2, 5), "adams": (3, 5)}
"""Substeps that get fewer for later points, even in steps of the schedule."""
WAYS: dict[str, CompletionConfig] = {
    "tweedie": CompletionConfig(rule="tweedie"),
    **{
        f"{solver} {n}" + (", schedule spacing" if spacing == "schedule" else ""): CompletionConfig(
            rule="ode", substeps=n, spacing=spacing, solver=solver, tapers=False
        )
        for solver, spacings in SOLVED.items()
        for spacing, many in spacings.items()
        for n in many
    },
    **{
        f"{solver} {n}, tapered": CompletionConfig(
            rule="ode", substeps=n, spacing="schedule", solver=solver, tapers=True
        )
        for solver, many in TAPERED.items()
        for n in many
    },
    "remaining schedule": CompletionConfig(rule="schedule", solver="euler"),
    "remaining schedule, adams": CompletionConfig(rule="schedule", solver="adams"),
    "fine": CompletionConfig(rule="ode", substeps=64, spacing="even", solver="adams", tapers=False),
}
"""Completions by name. Every key is explicit, so that a changed default cannot change the meaning of a name."""
REFERENCES = ("remaining schedule", "fine")


@dataclass(frozen=True)
class Point:
    """One point of one prompt's group, completed in one way for all members."""

    way: str
    prompt: int
    k: int
    forwards: int
    latents: np.ndarray
    scores: dict[str, np.ndarray]


def completed_points(world: World, prompts: Sequence[Prompt], members: int) -> Iterator[Point]:
    """Complete every stochastic point in every way, except a point that all members share.

    Args:
        world: model and scorers.
        prompts: one group for each.
        members: size of a group.

    Yields:
        Points with clean latents and scores.
    """
    for number, prompt in enumerate(track(prompts, "groups")):
        group = draw_group(world.policy, world.config, number=number, prompt=prompt, members=members)
        for point in group.points[1 if world.config.sampling.shared_noise else 0 :]:
            for way, completion in WAYS.items():
                clean, forwards = group.completed(point, completion)
                yield Point(way, number, point.k, forwards, clean.numpy(), group.scores(clean, world.scorers))


def summarise(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return one row for each way: forwards, error of the latents, and correlations by reference and scorer."""
    held = {(point.way, point.prompt, point.k): point for point in points}
    rows = []
    for way in WAYS:
        own = [point for point in points if point.way == way]
        row: dict[str, Any] = {"way": way, "forwards": float(np.mean([point.forwards for point in own]))}
        errors = [np.square(point.latents - held["fine", point.prompt, point.k].latents).mean() for point in own]
        row["latent_rms_error"] = float(np.sqrt(np.mean(errors)))
        for reference in REFERENCES:
            for name in own[0].scores:
                pairs = [(point.scores[name], held[reference, point.prompt, point.k].scores[name]) for point in own]
                row[f"{name} against {reference}"] = mean_correlation(pairs)
        rows.append(row)
    return rows


def mean_correlation(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """Return the mean rank correlation of pairs (a way's scores, the reference's scores)."""
    ranked = [(own, wanted) for own, wanted in pairs if np.ptp(wanted) > 0]
    each = [cast(Any, spearmanr(own, wanted)).statistic if np.ptp(own) > 0 else 0.0 for own, wanted in ranked]
    return float(np.mean(each)) if ranked else None


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot correlation against forwards, with a row for each reference and a panel for each scorer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [[key for key in rows[0] if key.endswith(f"against {reference}")] for reference in REFERENCES]
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["way"] != "fine":
            series.setdefault(re.sub(r" \d+", "", row["way"]), []).append(row)
    markers = {"e": "o", "a": "s", "h": "^", "t": "D", "r": "*"}
    figure = Figure(figsize=(5 * len(names[0]), 3.6 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(names[0]), squeeze=False).flat
    for axes, name in zip(panels, itertools.chain(*names), strict=True):
        for label, held in series.items():
            known = [row for row in held if row[name] is not None and not name.endswith(f"against {row['way']}")]
            forwards, values = [row["forwards"] for row in known], [row[name] for row in known]
            axes.plot(forwards, values, marker=markers[label[0]], label=label, alpha=0.8)
        axes.set(xlabel="forwards a point", ylabel="rank correlation", title=name)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def main(
    preset: Annotated[str, typer.Argument(help="Preset whose model, prompts, sampling and scorers are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, one group each.")] = 12,
    members: Annotated[int, typer.Option(min=3, help="Members of a group.")] = 24,
    out: Annotated[Path, typer.Option(help="JSON file; the plot has the same name.")] = Path(
        "runs/completion_fidelity.json"
    ),
) -> None:
    """Measure, print the table, write JSON and plot."""
    world = World.of(preset, overrides or [])
    chosen = world.prompts(prompts)
    with torch.no_grad():
        rows = summarise(list(completed_points(world, chosen, members)))
    facts = {"preset": preset, "overrides": overrides or [], "prompts": len(chosen), "members": members, "rows": rows}
    write_json(out, facts)
    plot(rows, out.with_suffix(".png"))
    show(rows)


if __name__ == "__main__":
    typer.run(main)
