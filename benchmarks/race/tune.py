"""Tunes all methods of the race alike: three learning rates times three values of the method's main knob, by halving.

    python -m benchmarks.race.tune run                                 # hours; resumable cell by cell
    python -m benchmarks.race.tune run --only elbo --rungs 1           # one method's first rung
    python -m benchmarks.race.tune table                               # what was measured, and each method's best

A cell trains one setting on one reward with a seed that no other race has, for the CPU seconds of its rung. A method's
iterations are those seconds over its pace, which is measured once, all methods one after the other. After each rung
the best settings train on. Settings are ranked by the mean, over the rewards, of the share of the way from the
untrained score to Flow-GRPO's that a cell has gone. Every measured cell is a line of
`docs/results/race_2026_tuning.json`; `race.finals` reads the tuned settings there.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.clock import cpu_clock
from benchmarks.output import show
from benchmarks.race.cell import Cell, read_cell, require_known, rounded, run_cell, seconds_an_iteration
from protocol.ground.files import write_whole

RUNS = Path("runs/race_tuning")
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "race_2026_tuning.json"
SEED = 90
GOALS: Mapping[str, float] = {"geneval": 0.608, "pickscore": 0.516}
"""The rewards that settings are tuned on, and the mean score of Flow-GRPO after 60 and 20 iterations."""
FEWER_IMAGES: Mapping[str, tuple[str, ...]] = dict.fromkeys(("geneval", "graded"), ("evaluation.images_per_prompt=12",))
"""Half of the images of the longer races, for a standard error of 0.021: an evaluation costs as much as iterations."""
RUNGS: Sequence[tuple[int, float]] = ((9, 30.0), (2, 90.0))
"""Settings of each rung and the CPU seconds that each has trained at its end; the winner is the last rung's best."""
PACE_ITERATIONS = 3
RATES = (2e-3, 1e-3, 4e-3)
KNOBS: Mapping[str, tuple[str, Sequence[float | str]]] = {
    "stepwise_tree": ("sampling.noise_level", (0.7, 0.5, 1.0)),
    "stepwise_fast": ("sampling.noise_level", (0.7, 0.5, 1.0)),
    "elbo": ("learner.forward.loss", ("pepg", "epg", "par")),
    "flow_grpo_fast": ("sampling.noise_level", (0.8, 0.6, 0.95)),
    "diffusion_nft": ("learner.forward.beta", (1.0, 0.3, 0.1)),
    "ram": ("learner.forward.multiplier", (3.0, 1.0, 10.0)),
    "awm": ("learner.old.weight", (1.0, 0.3, 3.0)),
    "dgpo": ("learner.forward.preference", (100.0, 10.0, 1000.0)),
    "flow_grpo": ("sampling.noise_level", (0.7, 0.5, 1.0)),
}
"""Each method's main knob and its values; the first one and `RATES[0]` are tried with all values of the other."""


@dataclass(frozen=True)
class Setting:
    """A method with a learning rate and a value of its knob."""

    method: str
    rate: float
    value: float | str

    @property
    def keys(self) -> tuple[str, str]:
        """The config overrides."""
        return f"learner.learning_rate={self.rate}", f"{KNOBS[self.method][0]}={self.value}"

    @property
    def folder(self) -> str:
        """Name of the folder of its cells."""
        return f"{self.rate}_{self.value}"


def settings_of(method: str) -> list[Setting]:
    """Return all settings of a method: the learning rates first, then the knob, then both."""
    values = KNOBS[method][1]
    every = [Setting(method, rate, value) for value in values for rate in RATES]
    return sorted(every, key=lambda each: each.rate != RATES[0] and each.value != values[0])


@dataclass
class Tuning:
    """What has been measured so far; the file holds it all."""

    path: Path
    paces: dict[str, float] = field(default_factory=dict)
    """CPU seconds of an iteration by `name/reward`; the name is the method's, with the setting of a final."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    """One for each setting, reward and rung."""

    @classmethod
    def read(cls, path: Path = PUBLISHED) -> "Tuning":
        """Read the file; without one, nothing is measured yet."""
        held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls(path, held.get("paces", {}), held.get("cells", []))

    def write(self) -> None:
        lines = ",\n".join(json.dumps(rounded(cell)) for cell in self.cells)
        write_whole(self.path, f'{{"paces": {json.dumps(rounded(self.paces))},\n"cells": [\n{lines}\n]}}\n')

    def result(self, setting: Setting, reward: str, rung: int) -> dict[str, Any] | None:
        """Return the cell, None if it has not been measured."""
        wanted = asdict(setting) | {"reward": reward, "rung": rung}
        return next((cell for cell in self.cells if wanted.items() <= cell.items()), None)

    def gain(self, setting: Setting, rung: int) -> float | None:
        """Return the mean share of the way to the goals, None if a reward has not been measured."""
        cells = [self.result(setting, reward, rung) for reward in GOALS]
        shares = [
            (cell["score"] - cell["start"]) / (GOALS[cell["reward"]] - cell["start"])
            for cell in cells
            if cell is not None
        ]
        return statistics.fmean(shares) if len(shares) == len(GOALS) else None

    def ranked(self, method: str, rung: int) -> list[Setting]:
        """Return the settings that a rung has measured on all rewards, the best first."""
        known = {each: gain for each in settings_of(method) if (gain := self.gain(each, rung)) is not None}
        return sorted(known, key=lambda each: -known[each])

    def entrants(self, method: str, rung: int) -> list[Setting]:
        """Return the settings that train in a rung; none as long as the rung before is not complete."""
        if rung == 0:
            return settings_of(method)
        before = self.ranked(method, rung - 1)
        return before[: RUNGS[rung][0]] if len(before) == RUNGS[rung - 1][0] else []

    def best(self, method: str) -> Setting:
        """Return the best setting of the last rung that the method has ended.

        An unfinished first rung counts too, so that a race can begin; which cells it has, the file says.

        Raises:
            typer.BadParameter: the method has no cell on all rewards.
        """
        for rung in reversed(range(len(RUNGS))):
            ranked = self.ranked(method, rung)
            if ranked and (rung == 0 or len(ranked) == RUNGS[rung][0]):
                return ranked[0]
        raise typer.BadParameter(f"a raced method must be tuned, got {method}: run `benchmarks.race.tune run` first")


def measure_pace(tuning: Tuning, name: str, cell: Cell, keys: Sequence[str], runs: Path) -> float:
    """Return the CPU seconds of an iteration, the quickest of some, which are kept by name and reward."""
    name = f"{name}/{cell.reward}"
    if name not in tuning.paces:
        folder = runs / "pace" / name
        extra = ("evaluation.images_per_prompt=1", *keys)
        run_cell(cell, folder, iterations=PACE_ITERATIONS, every=0, extra=extra)
        tuning.paces[name] = seconds_an_iteration(folder / cell.folder)
        tuning.write()
    return tuning.paces[name]


def train(tuning: Tuning, setting: Setting, reward: str, rung: int, runs: Path) -> None:
    """Train a cell to the end of its rung, from where it is, and note its score."""
    cell, folder = Cell(setting.method, SEED, reward), runs / setting.folder
    pace = measure_pace(tuning, setting.method, cell, setting.keys, runs)
    iterations = max(1, round(RUNGS[rung][1] / pace))
    extra = (*FEWER_IMAGES.get(reward, ()), *setting.keys)
    run_cell(cell, folder, iterations=iterations, every=0, extra=extra)
    curve = read_cell(cell, folder)
    score = dict(zip(curve["iterations"], curve["scores"], strict=True))
    tuning.cells.append(
        {
            **asdict(setting),
            "reward": reward,
            "rung": rung,
            "iterations": iterations,
            "start": score[0],
            "score": score[iterations],
        }
    )
    tuning.write()


def todo(tuning: Tuning, methods: Sequence[str], rung: int, most: int) -> Iterator[tuple[Setting, str]]:
    """Yield the cells of a rung that are not measured, the first settings of all methods before the next ones."""
    entrants = {method: tuning.entrants(method, rung)[:most] for method in methods}
    for number in range(max(map(len, entrants.values()))):
        for settings in entrants.values():
            for reward in GOALS:
                if number < len(settings) and not tuning.result(settings[number], reward, rung):
                    yield settings[number], reward


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(
    only: Annotated[list[str] | None, typer.Option(help="Methods; by default all.")] = None,
    rungs: Annotated[int, typer.Option(min=1, max=len(RUNGS), help="How many rungs.")] = len(RUNGS),
    most: Annotated[int, typer.Option(min=1, help="The most settings of a method in a rung.")] = RUNGS[0][0],
    runs: Annotated[Path, typer.Option(help="Folder of the cells.")] = RUNS,
    out: Annotated[Path, typer.Option(help="JSON file of the results.")] = PUBLISHED,
) -> None:
    """Train the cells one after the other; run the command again to continue."""
    methods, tuning = only or list(KNOBS), Tuning.read(out)
    require_known("method of the race", methods, KNOBS)
    with cpu_clock():
        for method in methods:  # all paces in one go, as the other programs of the machine change
            for reward in GOALS:
                measure_pace(tuning, method, Cell(method, SEED, reward), settings_of(method)[0].keys, runs)
        for rung in range(rungs):
            for setting, reward in todo(tuning, methods, rung, most):
                typer.echo(f"rung {rung}, {reward}: {setting}")
                train(tuning, setting, reward, rung, runs)


@app.command()
def table(out: Annotated[Path, typer.Option(help="JSON file of the results.")] = PUBLISHED) -> None:
    """Print each setting's share of the way to the goals at the end of each rung."""
    tuning, rows = Tuning.read(out), []
    for method in KNOBS:
        for setting in tuning.ranked(method, 0):
            gains = [tuning.gain(setting, rung) for rung in range(len(RUNGS))]
            shares = {f"{seconds:.0f} s": gain for (_, seconds), gain in zip(RUNGS, gains, strict=True)}
            chosen = "tuned" if setting == tuning.best(method) else ""
            rows.append(
                {"method": method, "learning rate": setting.rate, "knob": setting.keys[1], **shares, "": chosen}
            )
    show(rows)


if __name__ == "__main__":
    app()
