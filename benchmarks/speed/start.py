"""Seconds until a command that only shows something has ended: `flowcredit --help`, `flowcredit status`.

python -m benchmarks.speed.start
"""

import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

COMMANDS = ("--help", "status")


def main(repeats: Annotated[int, typer.Option(min=1, help="Times each command is started.")] = 10) -> None:
    """Print the least seconds and the least CPU seconds of each command; other programs only add to both."""
    for command in COMMANDS:
        seconds, cpu = zip(*(_timed(command) for _ in range(repeats)), strict=True)
        typer.echo(f"flowcredit {command:8} {min(seconds):.2f} s, {min(cpu):.2f} s of CPU")


def _timed(command: str) -> tuple[float, float]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "runs").mkdir()
        before, began = _cpu_s(), time.monotonic()
        subprocess.run([sys.executable, "-m", "flowcredit", command], cwd=folder, stdout=subprocess.DEVNULL, check=True)
        return time.monotonic() - began, _cpu_s() - before


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    typer.run(main)
