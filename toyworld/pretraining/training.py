"""The training loop of every pretraining stage: progress, checkpoints, and resuming after a kill.

All randomness of an optimizer step comes from `step_generator(seed, step)`, so an interrupted stage ends with the same
bits as an uninterrupted one. A checkpoint is written to a partial file and then renamed.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from protocol.files import whole

PLAIN_LINES = 40
"""Lines of progress that a stage prints if the output is no terminal."""

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints of a stage."""


class Stateful(Protocol):
    """Anything with torch's two state methods: a module, an optimizer, a weight average."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state."""
        ...


class WeightAverage:
    """Exponential moving average of a module's parameters; the stage that trains the module updates it.

    The decay grows with the step up to `decay`, so that the average forgets the random start early.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._mean = {name: value.detach().clone() for name, value in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Update the average after optimizer step `step` (from 0)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, value in module.named_parameters():
            self._mean[name].lerp_(value, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged tensors by parameter name."""
        return self._mean

    def load_state_dict(self, state: Any, /) -> None:
        """Load averages that `state_dict` returned."""
        self._mean = {name: value.clone() for name, value in state.items()}


def step_generator(seed: int, step: int) -> torch.Generator:
    """Return the generator of one optimizer step; it differs for every pair of seed and step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def learning_rate(step: int, steps: int, *, peak: float, warmup: int = 100) -> float:
    """Return the learning rate: linear warm-up to `peak`, then half a cosine down to a fiftieth of it.

    Args:
        step: the optimizer step, from 0.
        steps: total number of optimizer steps.
        peak: the largest learning rate.
        warmup: optimizer steps of the warm-up.

    Returns:
        The learning rate of this step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group of an optimizer."""
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
    """Run a stage's optimizer steps, starting at its checkpoint if there is one, and write checkpoints.

    Args:
        name: name of the stage; its checkpoint is `folder/name.pt`.
        steps: total number of optimizer steps.
        parts: the content of a checkpoint, by name.
        take_step: performs one optimizer step and returns its loss.
        folder: folder of the checkpoints; it is created if needed.
        console: receives the progress: a bar on a terminal, otherwise some lines.
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


def _resume(path: Path, parts: dict[str, Stateful]) -> int:
    """Load a checkpoint into the parts and return the number of finished steps."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    return saved["step"]


def _save(path: Path, step: int, parts: dict[str, Stateful]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        torch.save({"step": step, "parts": {name: part.state_dict() for name, part in parts.items()}}, partial)


@contextmanager
def _progress(name: str, steps: int, start: int, console: Console) -> Iterator[Callable[[int, float], None]]:
    """Yield a function that shows the progress; it is called after each step with the step and its loss."""
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
            console.print(f"{name}: step {step + 1}/{steps}, loss {loss:.4f}, {seconds:.3f} s per step")

    yield line
