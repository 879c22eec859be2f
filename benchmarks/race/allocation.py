"""Do prompts whose members differ in reward deserve more of a run's groups? None for solved ones, at equal cost.

    python -m benchmarks.race.allocation run --reward geneval --iterations 30 --every 5 --seeds 2
    python -m benchmarks.race.allocation table --reward geneval

A cell is the race's cell of `stepwise_fast` in all but this: after a first pass over all prompts, those of an iteration
are drawn at random, each with a probability in proportion to the std of its group's rewards when it was trained last.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import learner.loop.groups
from benchmarks.race.race import Cell, cell_config, read_cell, run_cell
from flow.maths.noise import generator
from learner.loop.groups import drop_if_void, prompt_at
from protocol.messages import Prompt, ScoredShard

METHOD = "stepwise_fast"
RUNS = Path("runs/allocation")
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "race_shared.json"
LEAST_SHARE = 0.05
"""Least weight of a prompt, as a share of the mean weight: one that was solved may be forgotten."""


@dataclass
class Allocation:
    """Takes the parts of `prompt_at` and `drop_if_void` in one run without lag, and sees each group's rewards there."""

    per_iteration: int
    """Groups of an iteration."""
    spread: dict[int, float] = field(default_factory=dict)
    """Std of the rewards of a prompt's last group, by the prompt's index."""
    _chosen: dict[int, tuple[Prompt, ...]] = field(default_factory=dict)

    def prompt_at(self, prompts: Sequence[Prompt], index: int, *, seed: int) -> Prompt:
        """Choose the prompt of one group: a new one as long as there are any, then by its spread.

        Args:
            prompts: the training prompts.
            index: the group's index, counted from the start of the run.
            seed: keys the order of the first pass and the draws.

        Returns:
            One of `prompts`; no prompt has two groups in an iteration.
        """
        iteration, group = divmod(index, self.per_iteration)
        if iteration not in self._chosen:
            self._chosen[iteration] = self._choose(prompts, iteration, seed)
        return self._chosen[iteration][group]

    def drop_if_void(self, prompt: Prompt, shards: Sequence[ScoredShard]) -> tuple[ScoredShard, ...]:
        """Remember the std of the finished images' rewards."""
        kept = drop_if_void(prompt, shards)
        rewards = np.concatenate([shard.scores.values[shard.facts.image_index[:, -1]] for shard in kept])
        self.spread[prompt.index] = float(np.nanstd(rewards)) if np.isfinite(rewards).any() else 0.0
        return kept

    def _choose(self, prompts: Sequence[Prompt], iteration: int, seed: int) -> tuple[Prompt, ...]:
        first = iteration * self.per_iteration
        fresh = [
            prompt_at(prompts, at, seed=seed) for at in range(first, min(first + self.per_iteration, len(prompts)))
        ]
        lacking = self.per_iteration - len(fresh)
        if not lacking:
            return tuple(fresh)
        known = [prompt for prompt in prompts if prompt.index in self.spread and prompt not in fresh]
        weights = np.array([self.spread[prompt.index] for prompt in known])
        weights = np.maximum(weights, LEAST_SHARE * weights.mean()) + 1e-9
        rng = generator("allocation", seed, iteration)
        drawn = rng.choice(len(known), size=lacking, replace=False, p=weights / weights.sum())
        return (*fresh, *(known[at] for at in drawn))


@contextmanager
def allocated(per_iteration: int) -> Iterator[Allocation]:
    """Let runs inside the block choose their prompts by an `Allocation` for this many groups an iteration."""
    allocation = Allocation(per_iteration)
    learner.loop.groups.prompt_at = allocation.prompt_at
    learner.loop.groups.drop_if_void = allocation.drop_if_void
    try:
        yield allocation
    finally:
        learner.loop.groups.prompt_at, learner.loop.groups.drop_if_void = prompt_at, drop_if_void


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Runs = Annotated[Path, typer.Option(help="Folder of the cells.")]
Reward = Annotated[str, typer.Option(help="A reward of the race.")]


@app.command()
def run(
    reward: Reward = "geneval",
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of every cell.")] = 30,
    every: Annotated[int, typer.Option(min=1, help="Iterations between evaluations.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 1,
    runs: Runs = RUNS,
) -> None:
    """Train the cells one after the other, each in one go: one that went on would have forgotten the spreads."""
    for seed in range(seeds):
        cell = Cell(variant=METHOD, seed=seed, reward=reward)
        if (runs / cell.folder).exists():
            raise typer.BadParameter(f"a cell begins in a new folder, {runs / cell.folder} exists: remove it")
        config = cell_config("toy_geneval", cell, iterations=iterations, every=every, extra=())
        with allocated(config.group.per_iteration):
            run_cell("toy_geneval", cell, runs, iterations=iterations, seconds=0.0, every=every, extra=())


@app.command()
def table(
    reward: Reward = "geneval",
    runs: Runs = RUNS,
    published: Annotated[Path, typer.Option(help="Cells of the race to compare with.")] = PUBLISHED,
) -> None:
    """Print the held-out scores of the cells, and of the race's cells with the same seeds."""
    held = json.loads(published.read_text(encoding="utf-8"))["cells"]
    race = {each["seed"]: each for each in held if each["variant"] == METHOD and each["reward"] == reward}
    shown = Table("prompts", "seed", "held-out score at iteration", box=MARKDOWN)
    for seed in sorted(race):
        own = read_cell(Cell(variant=METHOD, seed=seed, reward=reward), runs)
        for name, cell in (("in turn", race[seed]), ("by spread", own)):
            if cell and own:
                scores = zip(cell["iterations"], cell["scores"], strict=True)
                shown.add_row(name, str(seed), ", ".join(f"{at}: {score:.3f}" for at, score in scores))
    Console(width=160).print(shown)


if __name__ == "__main__":
    app()
