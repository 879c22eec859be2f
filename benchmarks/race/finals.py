"""The race of 2026: methods with their tuned settings, for equally many CPU seconds.

    python -m benchmarks.race.finals run --only elbo --reward geneval --seeds 1   # resumable cell by cell
    python -m benchmarks.race.finals run --only elbo --setting "guidance 2"       # one that nobody was tuned on
    python -m benchmarks.race.finals report --out docs/results/race_2026.json     # tables, JSON and plot

Learning rate, knob and pace are those of `race.tune`; `--only` also takes a variant of a tuned method. A cell trains
for `SECONDS` by its pace and is evaluated after `PARTS` equal parts, with a second scorer that never trains and the
diversity of a prompt's images. `report` joins own cells with the published ones.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.clock import cpu_clock
from benchmarks.output import show
from benchmarks.race.cell import (
    Cell,
    arrival,
    cells_in,
    deepest_fall,
    folder_name,
    mean_curve,
    read_cell,
    require_known,
    rounded,
    run_cell,
    score_at,
)
from benchmarks.race.plots import write_plot
from benchmarks.race.tune import FEWER_IMAGES, GOALS, KNOBS, SEED, Tuning, measure_pace
from benchmarks.race.tune import RUNS as TUNING_RUNS
from benchmarks.race.variants import REWARDS, VARIANTS
from protocol.ground.files import write_whole

RUNS = Path("runs/race_2026")
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "race_2026.json"
SECONDS, PARTS = 120.0, 5
"""Training seconds of a cell, and its evaluations: about five times what the first method needs for a goal."""
RIVALS = [name for name in KNOBS if not name.startswith("stepwise_")]
"""Methods that are not ours."""
PEER = "flow_grpo"
"""Its mean score at the end is the goal of a setting and reward."""
TUNED = "tuned"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    TUNED: (),
    "T = 10, SD3's schedule": ("sampling.steps=10", "sampling.schedule=model"),
    "guidance 2": ("model.guidance=2",),
}
CLIP = "args: {model: 'pkg://toyworld/clip'}"
PICKSCORE = f"rewards.second={{scorer: pickscore, use: evaluate, {CLIP}}}"
GENEVAL = "rewards.second={scorer: geneval, use: evaluate, args: {detector: 'toyworld.world.detector:ShapeDetector'}}"
SECOND: Mapping[str, tuple[tuple[str, ...], str]] = {
    "geneval": ((PICKSCORE,), "second"),
    "graded": ((PICKSCORE,), "second"),
    "pickscore": ((GENEVAL,), "second/strict"),
    "redness": ((GENEVAL,), "second/strict"),
    "ocr": ((), "ocr/exact"),
}
"""The scorer that only watches a reward, and the name of its reading; with OCR, the share of texts without an error."""
DIVERSITY = f"rewards.diversity={{scorer: diversity, sees: group, use: evaluate, {CLIP}}}"


def train(tuning: Tuning, cell: Cell, setting: str, runs: Path) -> None:
    """Train a cell, or continue it, and note beside its run folder what it was tuned to."""
    variant = VARIANTS[cell.variant]
    tuned = tuning.best(variant.method)
    keys = (*tuned.keys, *variant.keys)
    pace = pace_of(tuning, cell, setting)
    every = max(1, round(SECONDS / PARTS / pace))
    watched = (*SECOND[cell.reward][0], DIVERSITY, *FEWER_IMAGES.get(cell.reward, ()))
    extra = (*keys, *watched, *SETTINGS[setting])
    folder = folder_of(setting, runs) / tuned.folder  # another setting trains anew
    run_cell(cell, folder, iterations=PARTS * every, every=every, extra=extra)
    note = {"setting": setting, "tuned": " ".join(tuned.keys), "pace": pace}
    write_whole(folder / cell.folder / "final.json", json.dumps(note) + "\n")


def pace_of(tuning: Tuning, cell: Cell, setting: str) -> float:
    """Return the CPU seconds of an iteration in a setting; measured if it is not known."""
    variant = VARIANTS[cell.variant]
    keys = (*tuning.best(variant.method).keys, *variant.keys, *SETTINGS[setting])
    name = cell.variant if setting == TUNED else f"{cell.variant}, {setting}"
    return measure_pace(tuning, name, Cell(cell.variant, SEED, cell.reward), keys, TUNING_RUNS)


def folder_of(setting: str, runs: Path) -> Path:
    """Return the folder of all cells of a setting."""
    return runs / folder_name(setting)


def read(cell: Cell, folder: Path) -> dict[str, Any] | None:
    """Read a cell's curves: held-out score, second score and diversity; None before it has ended."""
    note = folder / cell.folder / "final.json"
    if not note.exists():
        return None
    final = json.loads(note.read_text(encoding="utf-8"))
    pace = final.pop("pace")
    start = "evaluation/reward/"
    curve = read_cell(cell, folder, second=f"{start}{SECOND[cell.reward][1]}", diversity=f"{start}diversity")
    return {**final, **curve, "seconds": [pace * iteration for iteration in curve["iterations"]]}


def key_of(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return cell["setting"], cell["reward"], cell["variant"], cell["tuned"], cell["seed"]


def all_cells(runs: Path, published: Path) -> list[dict[str, Any]]:
    """Return the published cells and those of `runs`, which replace published ones, in order of setting and reward."""
    held = json.loads(published.read_text(encoding="utf-8"))["cells"] if published.exists() else []
    found = {key_of(cell): cell for cell in held}
    for setting in SETTINGS:
        for folder in sorted(folder_of(setting, runs).glob("*")):
            for each in cells_in(folder):
                if cell := read(each, folder):
                    found[key_of(cell)] = cell
    order = [list(SETTINGS), list(REWARDS), list(VARIANTS)]
    return sorted(
        found.values(), key=lambda cell: [names.index(cell[k]) for names, k in zip(order, ORDER, strict=True)]
    )


ORDER = ("setting", "reward", "variant")


def goal_of(cells: Sequence[Mapping[str, Any]]) -> float:
    """Return the score at which `PEER` ends, infinity as long as it has no cell."""
    ends = [cell["scores"][-1] for cell in cells if cell["variant"] == PEER]
    return statistics.fmean(ends) if ends else math.inf


def rows_of(cells: Sequence[Mapping[str, Any]], setting: str, reward: str) -> list[dict[str, Any]]:
    """Return one row for each variant and what it was tuned to, the first at the goal first; means over its seeds."""
    own = [cell for cell in cells if (cell["setting"], cell["reward"]) == (setting, reward)]
    goal = goal_of(own)
    groups = dict.fromkeys((cell["variant"], cell["tuned"]) for cell in own)
    members = {key: [cell for cell in own if (cell["variant"], cell["tuned"]) == key] for key in groups}
    means = {key: mean_curve(seeds, ("scores", "seconds", "diversity")) for key, seeds in members.items()}
    rivals = (mean["scores"][-1] for (name, _), mean in means.items() if name in RIVALS)
    rival = max(rivals, default=math.inf)
    equal = min((mean["seconds"][-1] for mean in means.values()), default=math.inf)
    rows = []
    for (variant, tuned), seeds in members.items():
        mean = means[variant, tuned]
        rows.append(
            {
                "variant": variant,
                "tuned rate, knob": ", ".join(key.split("=")[1] for key in tuned.split()),
                "seeds": len(seeds),
                "seconds an iteration": mean["seconds"][-1] / mean["iterations"][-1],
                "seconds to the goal": arrival(mean["seconds"], mean["scores"], goal),
                "iterations to it": arrival(mean["iterations"], mean["scores"], goal),
                "seconds to the best rival's end": arrival(mean["seconds"], mean["scores"], rival),
                "score after equal seconds": score_at(mean, "seconds", equal),
                "end": mean["scores"][-1],
                "second scorer": statistics.fmean(cell["second"][-1] for cell in seeds),
                "diversity": mean["diversity"][-1],
                "diversity at the best rival's end": arrival(mean["diversity"], mean["scores"], rival),
                "deepest fall": statistics.fmean(deepest_fall(cell["scores"]) for cell in seeds),
            }
        )
    return sorted(rows, key=lambda row: row["seconds to the goal"] or float("inf"))


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option(help="Methods, or variants of them; by default all methods.")
    ] = None,
    reward: Annotated[list[str] | None, typer.Option(help="Rewards; by default the two of the tuning.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Settings; by default the tuned one.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 1,
    runs: Annotated[Path, typer.Option(help="Folder of the cells.")] = RUNS,
) -> None:
    """Train the cells one after the other; run the command again to continue."""
    names, rewards, settings = only or list(KNOBS), reward or list(GOALS), setting or [TUNED]
    require_known("variant", names, [name for name, each in VARIANTS.items() if each.method in KNOBS])
    require_known("reward", rewards, REWARDS)
    require_known("setting", settings, SETTINGS)
    tuning = Tuning.read()
    with cpu_clock():
        for each in settings:
            for cell in [Cell(name, 0, trained) for trained in rewards for name in names]:
                pace_of(tuning, cell, each)  # all in one go, as the other programs of the machine change
        for seed in range(seeds):
            for each in settings:
                for cell in [Cell(name, seed, trained) for trained in rewards for name in names]:
                    typer.echo(f"{each}: {cell.folder}")
                    train(tuning, cell, each, runs)


@app.command()
def report(
    runs: Annotated[Path, typer.Option(help="Folder of the cells.")] = RUNS,
    published: Annotated[Path, typer.Option(help="JSON file of cells that were measured before.")] = PUBLISHED,
    out: Annotated[Path, typer.Option(help="JSON file; the plot has its stem.")] = Path("runs/race_2026.json"),
) -> None:
    """Print a table for each setting and reward, and write JSON and the curves of the tuned setting."""
    cells = all_cells(runs, published)
    if not cells:
        raise typer.BadParameter(f"{runs} holds no finished cell: run `python -m benchmarks.race.finals run` first")
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(rounded(cell)) for cell in cells)
    write_whole(out, f'{{"cells": [\n{lines}\n]}}\n')
    for setting in SETTINGS:
        for reward in REWARDS:
            if rows := rows_of(cells, setting, reward):
                goal = goal_of([cell for cell in cells if (cell["setting"], cell["reward"]) == (setting, reward)])
                show(rows, title=f"{reward}, {setting}: goal {goal:.3f}")
    own = [cell for cell in cells if cell["setting"] == TUNED and cell["variant"] in KNOBS]
    if own:
        write_plot(own, out.with_suffix(".png"), list(KNOBS))


if __name__ == "__main__":
    app()
