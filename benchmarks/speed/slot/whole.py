"""Whole runs, and the tests that need a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.speed.gpu import Setup, iterate
from benchmarks.speed.slot.part import Figures, Where


def exactness(where: Where) -> Iterator[Figures]:
    """Run the tests of `tests/gpu` that need no Ray, and compare half precision with the pipelines'."""
    yield _tested(where, "not ray", "tests/flow/models/test_half_parity.py", processes=8)


def on_ray(where: Where) -> Iterator[Figures]:
    """Run those that need Ray."""
    yield _tested(where, "ray", processes=4)


def run(where: Where) -> Iterator[Figures]:
    """Train the preset with random weights for three iterations, on a GPU with Ray."""
    setup = Setup(device=where.device, is_tiny=where.is_tiny, members=4 if where.is_tiny else 24)
    words = ["group.per_iteration=1", "learner.updates_per_iteration=1", "model.dtype=bfloat16"]
    with TemporaryDirectory() as folder:
        yield dict(iterate(setup, Path(folder) / "run", iterations=3, words=words))


def _tested(where: Where, which: str, *more: str, processes: int) -> Figures:
    device, spread = ("gpu", ["-n", str(processes)]) if where.device == "cuda" else ("not gpu", [])
    command = [sys.executable, "-m", "pytest", "-v", "-m", f"{device} and {which}", *spread, "tests/gpu", *more]
    lines = [""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)  # the log has it even if this process is stopped
            sys.stdout.flush()
            lines.append(line.strip())
    return {
        "code": process.returncode,
        "tests": lines[-1],
        "failed": "; ".join(each for each in lines if each.startswith("FAILED")),
    }
