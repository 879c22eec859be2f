"""Do the slopes and stds of the iteration before serve as well? They are known before an iteration's last group.

    python -m benchmarks.race.race run --reward geneval --iterations 30 --seeds 1 --only stepwise_calibrated
    python -m benchmarks.race.earlier run
    python -m benchmarks.race.earlier draw docs/results/earlier.png

A cell is the race's cell of `stepwise_calibrated` in all but this: values are calibrated with the slopes, and
advantages divided by the stds, that the iteration before had by its own rewards. The first iteration has its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Float
from torch import Tensor

import learner.update.learner
from benchmarks.race.race import RUNS as RACE
from benchmarks.race.race import Cell, run_cell
from deploy.folder.read import lines_of
from learner.credit.assign import Assignment, assign_credit
from learner.credit.normalisers import deviations, per_step
from learner.credit.rules import gae
from learner.credit.tables import RewardTables, along_windows
from protocol.config.credit import CreditConfig

METHOD = "stepwise_calibrated"
RUNS = Path("runs/earlier")


class Earlier:
    """Takes the part of `assign_credit` in one run. It is called twice in an iteration, with equal tables."""

    def __init__(self) -> None:
        self._rewards: Tensor | None = None
        self._before: Assignment | None = None
        self._own: Assignment | None = None

    def __call__(
        self,
        tables: RewardTables,
        config: CreditConfig,
        *,
        reward_weights: Mapping[str, float],
        step_weights: Float[Tensor, " T"],
        baseline: Float[Tensor, " T"] | None = None,
    ) -> Assignment:
        """Assign the credit of one iteration; the arguments are those of `assign_credit`."""
        if self._rewards is None or not torch.equal(tables.rewards.nan_to_num(), self._rewards):
            self._rewards, self._before = tables.rewards.nan_to_num(), self._own
        self._own = assign_credit(
            tables,
            config,
            reward_weights=reward_weights,
            step_weights=step_weights,
            baseline=baseline,
        )
        if self._before is None:
            return self._own
        return with_statistics(tables, config, self._own, self._before, step_weights)


def with_statistics(
    tables: RewardTables,
    config: CreditConfig,
    own: Assignment,
    before: Assignment,
    step_weights: Float[Tensor, " T"],
) -> Assignment:
    """Assign the default method's credit with other statistics.

    Args:
        tables: rewards of the iteration.
        config: the credit of `stepwise_calibrated`.
        own: the iteration's credit with its own statistics.
        before: an iteration whose slopes, and stds of step rewards, are taken; a step that it has not seen takes the
            iteration's own slope.
        step_weights: factors of the advantages.

    Returns:
        Step rewards, values and advantages.
    """
    assert own.slopes is not None, f"{METHOD} calibrates its values"
    assert before.slopes is not None
    slopes = torch.where(before.slopes.isnan(), own.slopes, before.slopes)
    rewards = tables.rewards.double()
    differences = torch.stack(
        [torch.stack([deviations(column) for column in group.unbind(1)], dim=1) for group in rewards]
    )
    values = (differences * torch.cat([slopes, slopes.new_ones(1)])).float()
    step_rewards = along_windows(partial(gae, decay=config.gae_lambda), values, tables.explored)
    pool = before.step_rewards.flatten(0, 1)
    found = [per_step(group, epsilon=config.epsilon, ddof=config.ddof, pool=pool) for group in step_rewards]
    advantages = torch.stack(found).clamp(-config.advantage_clip, config.advantage_clip) * step_weights
    return replace(own, step_rewards=step_rewards, advantages=advantages, slopes=slopes, values=values)


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of every cell.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 1,
    runs: Annotated[Path, typer.Option(help="Folder of the cells.")] = RUNS,
) -> None:
    """Train the cells one after the other, each in one go: one that went on would begin with its own statistics."""
    for seed in range(seeds):
        learner.update.learner.assign_credit = Earlier()
        cell = Cell(variant=METHOD, seed=seed, reward="geneval")
        if (runs / cell.folder).exists():
            raise typer.BadParameter(f"a cell begins in a new folder, {runs / cell.folder} exists: remove it")
        run_cell("toy_geneval", cell, runs, iterations=iterations, seconds=0.0, every=10, extra=())


@app.command()
def draw(
    out: Annotated[Path, typer.Argument(help="PNG file.")],
    runs: Annotated[Path, typer.Option(help="Folder of the cells.")] = RUNS,
    race: Annotated[Path, typer.Option(help="Folder of the race with the default.")] = RACE,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Draw held-out score, training reward and gradient norm of a cell and of the default's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(1, 3)
    for label, folder in (("the iteration's own", race), ("the iteration before's", runs)):
        lines = lines_of(folder / Cell(variant=METHOD, seed=seed, reward="geneval").folder)
        for plot, name in zip(plots, ("evaluation/score", "reward/mean", "train/grad_norm"), strict=True):
            held = [line for line in lines if name in line]
            plot.plot([line["iteration"] for line in held], [line[name] for line in held], "o-", ms=3, label=label)
            plot.set(xlabel="iteration", title=name)
    plots[0].legend(title="slopes and stds")
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    app()
