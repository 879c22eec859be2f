"""Memory of every process of a long run: does any of them grow?

    python -m benchmarks.toy.growth --iterations 2000 group.size=6 learner.learning_rate=1e-5
    python -m benchmarks.toy.growth --iterations 2000 group.size=6 learner.learning_rate=1e-5 --in-use

With the preset's learning rate two groups of six ruin the policy, and the guard of contrast ends the run.

A real run on a Ray of its own. Every few seconds the memory of each of its processes is read: its anonymous pages,
of which one that is shared by n forks counts as 1/n page in each (`Pss_Anon`). So the sum over all processes is what
they take of the machine, without program code and the object store. Processes count by role: the driver, each kind of
actor, and Ray's own services.
"""

import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
from rich.progress import Progress

from benchmarks.heap import anonymous_mib, in_use_mib
from benchmarks.output import show
from deploy.folder.read import status_of
from deploy.monitor.progress import Progress as RunProgress
from deploy.presets import load_config
from deploy.run.run import run_training

QUARTERS = 4
Samples = dict[str, list[tuple[int, float]]]
"""By role: the iteration, and MiB of all processes of the role together."""


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides.")] = None,
    preset: Annotated[str, typer.Option(help="Preset of the run.")] = "toy_geneval",
    iterations: Annotated[int, typer.Option(min=8, help="Length of the run.")] = 2000,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 3.0,
    is_in_use: Annotated[bool, typer.Option("--in-use", help="Train in this process; read what is in use.")] = False,
) -> None:
    """Run, read memory, and print the mean of each quarter of the run but its first tenth, and the growth."""
    keys = [f"iterations={iterations}", "group.per_iteration=2", "evaluation.every=0", *(overrides or [])]
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if is_in_use:
            readings = Readings()
            run_training(load_config(preset, overrides=keys), folder=folder, is_local=True, progress=readings)
            samples = readings.samples
        else:
            samples = _samples([preset, *keys], folder, iterations, every_s)
    found = list(rows(samples, iterations))
    if not found:
        message = f"the run must be read at {2 * QUARTERS} different iterations or more: give more --iterations"
        raise typer.BadParameter(f"{message} than {iterations}, or a smaller --every-s than {every_s:g}")
    names = [*(f"quarter {number + 1}" for number in range(QUARTERS)), "growth in 1,000 iterations"]
    title = "MiB of one process" if is_in_use else "MiB of anonymous memory"
    show([{"memory of": role, **dict(zip(names, row, strict=True))} for role, row in found], title)


class Readings(RunProgress):
    """Reads the memory of this process when an iteration of its run ends."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: Samples = defaultdict(list)

    def recorded(self, iteration: int, line: Mapping[str, Any]) -> None:
        """Read, and show the iteration."""
        super().recorded(iteration, line)
        for what, held in (
            ("in use of the C library", in_use_mib()),
            ("in use of Python, 1,000 blocks", sys.getallocatedblocks() / 1000),
            ("anonymous pages", anonymous_mib()),
        ):
            self.samples[what].append((iteration, held))


def rows(samples: Samples, iterations: int) -> Iterator[tuple[str, list[float]]]:
    """Summarise the readings.

    Args:
        samples: the readings.
        iterations: length of the run; its first tenth is left out.

    Yields:
        A role with its mean MiB in each quarter, and the slope of a straight line through all readings, in MiB for
        1,000 iterations.
    """
    for role, readings in sorted(samples.items()):
        late = [(at, held) for at, held in readings if at >= iterations / 10]
        if len({at for at, _ in late}) < 2 * QUARTERS:
            continue  # a process that did not live through the run
        size = len(late) / QUARTERS
        parts = [late[round(part * size) : round((part + 1) * size)] for part in range(QUARTERS)]
        slope = statistics.linear_regression(*zip(*late, strict=True)).slope
        yield role, [*(statistics.fmean(held for _, held in part) for part in parts), 1000 * slope]


def role_of(process: psutil.Process) -> str | None:
    """Name what a process does in the run; None if it is gone or of no interest."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    title = " ".join(words)
    if actor := re.match(r"ray::(\w+)", title):
        return None if actor[1] == "IDLE" else actor[1]
    if any(name in title for name in ("raylet", "gcs_server", "dashboard", "monitor.py", "log_monitor")):
        return "services of Ray"
    if "warm/process.py" in title:
        return "warm process"
    return "driver" if "flowcredit" in title and "train" in words else None


def _samples(arguments: list[str], folder: Path, iterations: int, every_s: float) -> Samples:
    """Run `flowcredit train` and read its processes until it ends."""
    samples: Samples = defaultdict(list)
    command = [sys.executable, "-m", "flowcredit", "train", *arguments, "--run", str(folder)]
    log = folder.parent / "output"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run, Progress() as progress:
        task = progress.add_task("iterations", total=iterations)
        while run.poll() is None:
            time.sleep(every_s)
            now = _held(psutil.Process(run.pid))
            done = _done(folder)
            if done < iterations and now.keys() >= samples.keys():  # else a fork has ended: its pages go to others
                for role, held in now.items():
                    samples[role].append((done, held))
            progress.update(task, completed=done)
    if run.returncode:
        raise typer.BadParameter(log.read_text(encoding="utf-8")[-2000:])
    if (done := _done(folder)) < iterations:
        raise typer.BadParameter(f"the run was stopped after {done} of {iterations} iterations: run it again")
    return samples


def _done(folder: Path) -> int:
    found = status_of(folder)
    return found.status.iteration if found else 0


def _held(driver: psutil.Process) -> dict[str, float]:
    """MiB of anonymous memory by role."""
    held: dict[str, float] = defaultdict(float)
    try:
        processes = [driver, *driver.children(recursive=True)]
    except psutil.Error:
        return {}
    for process in processes:
        if role := role_of(process):
            try:
                held[role] += anonymous_mib(process.pid)
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
    return held


if __name__ == "__main__":
    typer.run(main)
