"""Whole runs, and the tests that need a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.speed.gpu import Setup, iterate
from benchmarks.speed.parts import Figures, Where


def exactness(where: Where) -> Iterator[Figures]:
    """Run the tests of `tests/gpu` that need no Ray."""
    yield _tested(where, "not ray")


def on_ray(where: Where) -> Iterator[Figures]:
    """Run those that need Ray, four at a time."""
    yield _tested(where, "ray", "-n", "4")


def run(where: Where) -> Iterator[Figures]:
    """Train the preset with random weights for three iterations, on a GPU with Ray."""
    setup = Setup(device=where.device, is_tiny=where.is_tiny, members=4 if where.is_tiny else 24)
    words = ["group.per_iteration=1", "learner.updates_per_iteration=1", "model.dtype=bfloat16"]
    with TemporaryDirectory() as folder:
        yield dict(iterate(setup, Path(folder) / "run", iterations=3, words=words))


def _tested(where: Where, which: str, *words: str) -> Figures:
    device = "gpu" if where.device == "cuda" else "not gpu"
    command = [sys.executable, "-m", "pytest", "-m", f"{device} and {which}", *words, "-v", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout)  # for the log
    sys.stderr.write(done.stderr)
    return {"code": done.returncode, "tests": done.stdout.strip().splitlines()[-1] if done.stdout else None}
