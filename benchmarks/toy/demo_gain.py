"""What a toy preset gains: the held-out score before and after training, for several seeds.

    python -m benchmarks.toy.demo_gain --seeds 5
    python -m benchmarks.toy.demo_gain --preset toy_edit --local --seeds 3

Each seed is a whole `flowcredit train PRESET seed=N` in its own folder; its minutes include the start of Ray. An
existing run is continued, or only read if it is finished. With `--local` a run is one process, whose CPU seconds are
exact.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.report.runs import HELDOUT, Run, read_run


def main(
    seeds: Annotated[int, typer.Option(help="Seeds 0 to N-1.", min=1)] = 5,
    preset: Annotated[str, typer.Option(help="The preset.")] = "toy_geneval",
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/demo_gain"),
    goal: Annotated[float, typer.Option(help="Least gain of a success.")] = 0.10,
    local: Annotated[bool, typer.Option("--local", help="One process without Ray; counts CPU seconds.")] = False,
    readings: Annotated[str, typer.Option(help="Further readings to show, split by commas.")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides of every run.")] = None,
) -> None:
    """Train the preset once for every seed and print the gains."""
    further = [name for name in readings.split(",") if name]
    table = Table("seed", "before", "after", "gain", "95 % interval", *further, "CPU s" if local else "minutes")
    gains = []
    for seed in range(seeds):
        folder = runs / f"seed_{seed}"
        began, used = time.monotonic(), _cpu_seconds()
        command = [sys.executable, "-m", "flowcredit", "train", preset, f"seed={seed}", *(overrides or [])]
        subprocess.run([*command, "--run", str(folder), *(["--local"] if local else [])], check=True)
        spent = f"{_cpu_seconds() - used:.0f}" if local else f"{(time.monotonic() - began) / 60:.1f}"
        run = read_run(folder)
        before, after = _ends(run, HELDOUT)
        gains.append(after - before)
        interval = " to ".join(f"{_ends(run, f'heldout_change/{end}')[1]:+.3f}" for end in ("low", "high"))
        shown = [" → ".join(f"{value:.3f}" for value in _ends(run, f"evaluation/reward/{name}")) for name in further]
        table.add_row(str(seed), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", interval, *shown, spent)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    reached = sum(gain >= goal for gain in gains)
    console.print(f"{reached} of {seeds} seeds gained at least {goal:.2f}; mean gain {sum(gains) / len(gains):+.3f}")


def _ends(run: Run, name: str) -> tuple[float, float]:
    """Return a metric of the first and of the newest evaluation that has it."""
    values = run.values(name, of="evaluations")[2]
    return values[0], values[-1]


def _cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    typer.run(main)
