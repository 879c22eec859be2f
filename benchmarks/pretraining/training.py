"""The training loop of every pretraining stage: progress, checkpoints, and resuming after a kill.

All randomness of an optimizer step comes from a generator that is seeded with the stage's seed and the step, so an
interrupted stage ends with the same bits as an uninterrupted one. A checkpoint is written to a partial file and then
renamed.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from protocol.ground.files import whole

PLAIN_LINES = 40
"""Lines of progress that a stage prints if the output is no terminal."""

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints of a stage."""

WARMUP = 100
"""Optimizer steps of the warm-up of `learning_rate`."""


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


def learning_rate(step: int, steps: int, *, peak: float) -> float:
    """Return the learning rate: linear warm-up to `peak`, then half a cosine down to a fiftieth of it.

    Args:
        step: the optimizer step, from 0.
        steps: total number of optimizer steps.
        peak: the largest learning rate.

    Returns:
        The learning rate of this step.
    """
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    done = (step - WARMUP) / max(steps - WARMUP, 1)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def run_stage(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss_of: Callable[[torch.Generator], Float[Tensor, ""]],
    rate: Callable[[int, int], float],
    steps: int,
    seed: int,
    folder: Path,
    console: Console,
    average: WeightAverage | None = None,
) -> None:
    """Run a stage's optimizer steps, starting at its checkpoint if there is one, and write checkpoints.

    Args:
        name: name of the stage; its checkpoint is `folder/name.pt`.
        model: what is trained.
        optimizer: of the model's parameters.
        loss_of: draws a batch from an optimizer step's generator and returns its loss.
        rate: the learning rate of an optimizer step, by the step and the total number of steps.
        steps: total number of optimizer steps.
        seed: seed of all generators.
        folder: folder of the checkpoints; it is created if needed.
        console: receives the progress: a bar on a terminal, otherwise some lines.
        average: updated after every optimizer step; None if the stage has none.
    """
    path = folder / f"{name}.pt"
    parts = {"model": model, "optimizer": optimizer} | ({"average": average} if average else {})
    start = _resume(path, parts)
    saved_at = time.monotonic()
    with _progress(name, steps, start, console) as advance:
        for step in range(start, steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps)
            loss = loss_of(torch.Generator().manual_seed(seed * 1_000_003 + step))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if average:
                average.update(model, step)
            advance(step, loss.item())
            if time.monotonic() - saved_at > SAVE_EVERY_S or step == steps - 1:
                _save(path, step + 1, parts)
                saved_at = time.monotonic()


def _resume(path: Path, parts: dict[str, Any]) -> int:
    """Load a checkpoint into the parts and return the number of finished steps."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    return saved["step"]


def _save(path: Path, step: int, parts: dict[str, Any]) -> None:
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
