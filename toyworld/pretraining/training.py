"""The loop that every stage of pretraining runs in: progress, checkpoints, and going on after a kill.

All randomness of a step comes from `step_generator(seed, step)`, so an interrupted stage ends bitwise where an
uninterrupted one does. `run_stage` saves whole files only (written beside, then renamed).
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

PLAIN_LINES = 40
"""Lines of progress a stage prints where there is no terminal."""

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints of a stage."""


class Stateful(Protocol):
    """Anything with torch's pair of state methods: a module, an optimizer, an average of weights."""

    def state_dict(self) -> dict[str, Any]:
        """The state as a mapping."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a state."""
        ...


class WeightAverage:
    """Exponential moving average of a module's parameters; made and updated by the stage that trains the module.

    The decay grows with the step up to `decay`, so early averages forget the random start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._mean = {name: value.detach().clone() for name, value in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move the average towards the module's weights after optimizer step `step` (from 0)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, value in module.named_parameters():
            self._mean[name].lerp_(value, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        """Parameter name to averaged tensor."""
        return self._mean

    def load_state_dict(self, state: Any, /) -> None:
        """Take over averages saved by `state_dict`."""
        self._mean = {name: value.clone() for name, value in state.items()}


def step_generator(seed: int, step: int) -> torch.Generator:
    """The generator of one step; different for every pair of seed and step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def learning_rate(step: int, steps: int, *, peak: float, warmup: int = 100) -> float:
    """Linear warm-up to `peak`, then half a cosine down to a fiftieth of it at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter group of an optimizer the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value


def run_stage(
    name: str,
    *,
    steps: int,
    parts: dict[str, Stateful],
    take_step: Callable[[int], float],
    folder: Path,
    console: Console,
) -> None:
    """Call `take_step(step)` for each step, from the stage's checkpoint if there is one, and save as it goes.

    Args:
        name: the stage; its checkpoint is `folder/name.pt`.
        steps: number of optimizer steps in all.
        parts: what a checkpoint holds, by name.
        take_step: does one optimizer step and returns its loss.
        folder: where checkpoints live; made if missing.
        console: a bar on a terminal, a line now and then elsewhere.
    """
    path = folder / f"{name}.pt"
    start = _resume(path, parts)
    saved_at = time.monotonic()
    with _progress(name, steps, start, console) as advance:
        for step in range(start, steps):
            advance(step, take_step(step))
            if time.monotonic() - saved_at > SAVE_EVERY_S or step == steps - 1:
                _save(path, step + 1, parts)
                saved_at = time.monotonic()


def checkpoint_parts(folder: Path, name: str) -> dict[str, Any]:
    """The parts of a stage's checkpoint, by name.

    Raises:
        FileNotFoundError: if the stage has not saved one yet.
    """
    return torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)["parts"]


def _resume(path: Path, parts: dict[str, Stateful]) -> int:
    """Load a checkpoint into the parts; the number of steps already done."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    return saved["step"]


def _save(path: Path, step: int, parts: dict[str, Stateful]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"step": step, "parts": {name: part.state_dict() for name, part in parts.items()}}, partial)
    os.replace(partial, path)


@contextmanager
def _progress(name: str, steps: int, start: int, console: Console) -> Iterator[Callable[[int, float], None]]:
    """A function to call after each step with its number and loss."""
    began = time.monotonic()
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(name, total=steps, completed=start)
            yield lambda step, loss: bar.update(task, completed=step + 1, description=f"{name} loss {loss:.4f}")
        return

    every = max(steps // PLAIN_LINES, 1)

    def line(step: int, loss: float) -> None:
        if (step + 1) % every == 0 or step == steps - 1:
            seconds = (time.monotonic() - began) / (step + 1 - start)
            console.print(f"{name}: step {step + 1}/{steps}, loss {loss:.4f}, {seconds:.3f} s a step")

    yield line
