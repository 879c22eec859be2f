"""What the demo gains: the held-out strict score before and after training, for several seeds.

    python -m benchmarks.toy.demo_gain --seeds 5

Each seed is a whole `flowcredit train toy_geneval seed=N` in its own folder; its minutes include the start of Ray. An
existing run is continued, or only read if it is finished.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.folder.read import evaluation_scores


def main(
    seeds: Annotated[int, typer.Option(help="Seeds 0 to N-1.", min=1)] = 5,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/demo_gain"),
    goal: Annotated[float, typer.Option(help="Least gain of a success.")] = 0.10,
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides of every run.")] = None,
) -> None:
    """Train the demo once for every seed and print the gains."""
    table = Table("seed", "before", "after", "gain", "minutes")
    gains = []
    for seed in range(seeds):
        folder = runs / f"seed_{seed}"
        began = time.monotonic()
        command = [sys.executable, "-m", "flowcredit", "train", "toy_geneval", f"seed={seed}", *(overrides or [])]
        subprocess.run([*command, "--run", str(folder)], check=True)
        minutes = (time.monotonic() - began) / 60
        read = evaluation_scores(folder)
        before, after = read[0], read[max(read)]
        gains.append(after - before)
        table.add_row(str(seed), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", f"{minutes:.1f}")
    console = Console()
    console.print(table)
    reached = sum(gain >= goal for gain in gains)
    console.print(f"{reached} of {seeds} seeds gained at least {goal:.2f}; mean gain {sum(gains) / len(gains):+.3f}")


if __name__ == "__main__":
    typer.run(main)
