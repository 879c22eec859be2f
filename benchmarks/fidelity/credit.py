"""The accuracy of a credit rule: the correlation of its advantages with the true advantages, found by brute force.

    python -m benchmarks.fidelity.credit toy_geneval group.size=24 method=stepwise_calibrated --prompts 12

The true advantage of step k is V(x_{k+1}) - V(x_k). V is the mean final reward if the policy continues from a point;
here it is the mean over `--continuations` stochastic continuations of every point of every trajectory. The part of the
advantages A that follows the true advantages A* gives the true policy gradient; every other part of A adds only noise.
So `fidelity` = <A, A*> / (|A| |A*|), over all members, steps and groups, compares rules without any training: for the
same signal-to-noise ratio rule b needs (f_a / f_b)^2 times the groups of rule a. |A*| is computed from two halves of
the continuations, so that their noise does not bias it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float
from rich.progress import track
from torch import Tensor

from benchmarks.fidelity.completion import WAYS
from benchmarks.fidelity.groups import Group, World, draw_group
from benchmarks.output import show, write_json
from flow.rollout import Step
from learner.credit.normalisers import NORMALISERS
from learner.credit.rules import calibrated, gae, gains, uniform
from learner.credit.tables import CreditRule
from protocol.messages import Prompt
from protocol.prompts import read_prompts
from rewards.scorer import build_scorer

Rewards = Float[np.ndarray, "groups N P"]
COMPLETIONS = ("tweedie", "euler 2", "adams 3, schedule spacing", "remaining schedule")
NORMALISATIONS = {
    "joint": ("joint", False),
    "joint, iteration's std": ("joint", True),
    "centred": ("centred", False),
    "per_step": ("per_step", False),
}
"""Normalisations by name: the normaliser, and whether its std is taken over all groups."""


@dataclass(frozen=True)
class Data:
    """One scorer's rewards of all groups: those of each completion, and the brute-force values in two halves."""

    rewards: Mapping[str, Rewards]
    halves: tuple[Rewards, Rewards]


@dataclass(frozen=True)
class Collector:
    """Generates groups, completes their points, and continues every point many times."""

    world: World
    members: int
    continuations: int

    def collect(self, prompts: Sequence[Prompt]) -> dict[str, Data]:
        """Collect one group for each prompt; return the rewards by scorer."""
        groups = [self._group(number, prompt) for number, prompt in enumerate(track(prompts, "groups"))]
        return {
            name: Data(
                rewards={way: np.stack([group[way][name] for group in groups]) for way in COMPLETIONS},
                halves=(
                    np.stack([group["first"][name] for group in groups]),
                    np.stack([group["second"][name] for group in groups]),
                ),
            )
            for name in self.world.scorers
        }

    def _group(self, number: int, prompt: Prompt) -> dict[str, dict[str, Float[np.ndarray, "N P"]]]:
        group = draw_group(self.world.policy, self.world.config, number=number, prompt=prompt, members=self.members)
        final = group.scores(group.final, self.world.scorers)
        generator = torch.Generator().manual_seed(number)
        columns: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in (*COMPLETIONS, "first", "second")}
        for point in group.points:
            for way in COMPLETIONS:
                columns[way].append(group.scores(group.completed(point, WAYS[way])[0], self.world.scorers))
            is_common = self.world.config.sampling.shared_noise and not point.k
            for half in ("first", "second"):
                columns[half].append(self._value(group, point, generator, is_common=is_common))
        return {
            name: {
                scorer: np.stack([*(c[scorer] for c in held), final[scorer]], axis=1) for scorer in self.world.scorers
            }
            for name, held in columns.items()
        }

    def _value(
        self, group: Group, point: Step, generator: torch.Generator, *, is_common: bool
    ) -> dict[str, Float[np.ndarray, " N"]]:
        """Return the mean final score over half the continuations of each member's point.

        If all members share the point, the mean is taken over all of them.
        """
        runs = []
        for _ in range(self.continuations // 2):
            latents = point.latents
            for k in range(point.k, self.world.policy.total_steps):
                is_stochastic = k in self.world.policy.steps
                transition, _ = self.world.policy.transition(
                    latents, k, conditioning=group.conditioning, as_ode=not is_stochastic
                )
                noise = torch.randn(latents.shape, generator=generator) if is_stochastic else None
                latents = transition.mean if noise is None else transition.sample(noise)
            runs.append(group.scores(latents, self.world.scorers))
        means = {name: np.mean([run[name] for run in runs], axis=0) for name in self.world.scorers}
        return {name: np.full_like(mean, mean.mean()) for name, mean in means.items()} if is_common else means


def step_rewards(rewards: Rewards) -> Iterator[tuple[str, Float[Tensor, "groups N S"]]]:
    """Yield the name and the step rewards of every rule."""
    tables = torch.from_numpy(rewards).float()
    values, _ = calibrated(tables)
    rules: dict[str, CreditRule] = {
        "uniform": uniform,
        "gains": gains,
        **{f"gae {decay}": partial(gae, decay=decay) for decay in (0.3, 0.5, 1.0)},
    }
    for name, rule in rules.items():
        yield name, torch.stack([rule(table) for table in tables])
        if name != "uniform":
            yield f"calibrated {name}", torch.stack([rule(table) for table in values])


def fidelity(advantages: Float[np.ndarray, "groups N S"], halves: tuple[Rewards, Rewards]) -> float:
    """Return <A, A*> / (|A| |A*|), with |A*|^2 as the product of two independent estimates, one from each half."""
    first, second = (np.diff(half, axis=2) for half in halves)
    first, second = first - first.mean(1, keepdims=True), second - second.mean(1, keepdims=True)
    size = np.sqrt(max((first * second).sum(), 0.0) * np.square(advantages).sum())
    return float((advantages * (first + second) / 2).sum() / size) if size else float("nan")


def rows_of(data: Mapping[str, Data]) -> list[dict[str, Any]]:
    """Return one row for each rule, completion and normalisation, with the fidelity by scorer."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for scorer, held in data.items():
        for way, rewards in held.rewards.items():
            for rule, tables in step_rewards(rewards):
                for name, (normalisation, is_pooled) in NORMALISATIONS.items():
                    if rule == "uniform" and (normalisation != "joint" or way != COMPLETIONS[0]):
                        continue
                    if "calibrated" in rule and normalisation == "centred":
                        continue  # the same as joint: calibrated values have no mean
                    normalise = partial(
                        NORMALISERS[normalisation],
                        epsilon=1e-4,
                        pool=tables.flatten(0, 1) if is_pooled else None,
                    )
                    advantages = [normalise(table) for table in tables]
                    key = (rule, "-" if rule == "uniform" else way, name)
                    row = rows.setdefault(key, dict(zip(("rule", "completion", "normalise"), key, strict=True)))
                    row[scorer] = fidelity(torch.stack(advantages).numpy(), held.halves)
    return list(rows.values())


def plot(rows: Sequence[Mapping[str, Any]], path: Path, scorers: Sequence[str]) -> None:
    """Plot a bar for each rule and a panel for each scorer.

    Args:
        rows: from `rows_of`; only one completion with joint normalisation by the iteration's std is shown.
        path: the PNG file.
        scorers: names of the scorers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["normalise"].endswith("'s std") and row["completion"] in ("-", "euler 2")]
    figure = Figure(figsize=(4 * len(scorers), 2.8), layout="constrained")
    panels = figure.subplots(1, len(scorers), sharey=True, squeeze=False).flat
    for axes, scorer in zip(panels, scorers, strict=True):
        names = [row["rule"] for row in shown]
        colours = ["0.6" if name == "uniform" else "C1" if "calibrated" in name else "C0" for name in names]
        axes.barh(names, [row[scorer] for row in shown], color=colours)
        axes.set(title=scorer, xlabel="correlation with true advantages", xlim=(0, 1))
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def main(
    preset: Annotated[str, typer.Argument(help="Preset whose model, prompts, sampling and scorers are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, one group each.")] = 12,
    members: Annotated[int, typer.Option(min=3, help="Members of a group.")] = 24,
    continuations: Annotated[int, typer.Option(min=2, help="Continuations of each point.")] = 16,
    out: Annotated[Path, typer.Option(help="JSON file; the plot has the same name.")] = Path(
        "runs/credit_fidelity.json"
    ),
) -> None:
    """Measure, print the table, write JSON and plot."""
    world = World.of(preset, overrides or [])
    world.scorers["pickscore"] = build_scorer("pickscore", model="pkg://toyworld/clip", batch=64, device="cpu")
    lines = read_prompts(world.config.data, world.config.data.train)
    order = np.random.default_rng(world.config.seed).permutation(len(lines))
    collector = Collector(world, members, continuations)
    with torch.no_grad():
        rows = rows_of(collector.collect([lines[index] for index in order[:prompts]]))
    facts = {"preset": preset, "overrides": overrides or [], "prompts": prompts, "members": members, "rows": rows}
    write_json(out, facts)
    plot(rows, out.with_suffix(".png"), list(world.scorers))
    show(rows)


if __name__ == "__main__":
    typer.run(main)
