"""Seconds until `flowcredit --help` and `flowcredit status` have ended, and until the demo's first iteration has.

python -m benchmarks.speed.start
"""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

COMMANDS = ("--help", "status")


def main(repeats: Annotated[int, typer.Option(min=1, help="Times each command is started.")] = 10) -> None:
    """Print the least seconds and the least CPU seconds of each command; other programs only add to both.

    The demo is started twice, and stopped after its first iteration. Before it, it evaluates the model it starts from.
    """
    for command in COMMANDS:
        seconds, cpu = zip(*(_timed(command) for _ in range(repeats)), strict=True)
        typer.echo(f"flowcredit {command:8} {min(seconds):.2f} s, {min(cpu):.2f} s of CPU")
    typer.echo(
        f"flowcredit demo     {min(_first_iteration_s() for _ in range(2)):.1f} s until its first iteration has ended"
    )


def _timed(command: str) -> tuple[float, float]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "runs").mkdir()
        before, began = _cpu_s(), time.monotonic()
        subprocess.run([sys.executable, "-m", "flowcredit", command], cwd=folder, stdout=subprocess.DEVNULL, check=True)
        return time.monotonic() - began, _cpu_s() - before


def _first_iteration_s() -> float:
    with TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-u", "-m", "flowcredit", "demo", "--no-page"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            took = next((time.monotonic() - began for line in demo.stdout if line.startswith("iteration 1/")), None)
            demo.send_signal(signal.SIGINT)
            demo.communicate(timeout=300)
        if took is None:
            raise RuntimeError("the demo ended before its first iteration had")
        return took


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    typer.run(main)
