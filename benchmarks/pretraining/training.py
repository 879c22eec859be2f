"""Recipes of pretraining, and the loop of every stage: progress, checkpoints, and resuming after a kill.

All randomness of an optimizer step comes from a generator that is seeded with the stage's seed and the step, so an
interrupted stage ends with the same bits as an uninterrupted one. A checkpoint is written each minute, to a partial
file that is then renamed.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import typer
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from torch import Tensor, nn

from benchmarks.output import write_json
from protocol.ground.files import whole

PLAIN_LINES = 40
"""Lines of progress that a stage prints."""

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints of a stage."""

WARMUP = 100
"""Optimizer steps of the warm-up of `learning_rate`."""


Words = Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Settings of the recipe.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.", min=1)]


class Recipe(BaseModel):
    """The settings that decide the weights; a work folder keeps its recipe and refuses any other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    """Seed of images, captions, weights, batches and noise."""

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Read the settings NAME=VALUE (typer.BadParameter: one is wrong)."""
        try:
            return cls.model_validate({name: value for name, _, value in (word.partition("=") for word in words)})
        except ValidationError as error:
            first = error.errors()[0]
            raise typer.BadParameter(f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']}") from None

    def claim(self, work: Path) -> None:
        """Write the recipe into the work folder, or check that the folder holds the same one.

        The numbers of steps may not change either, because the learning rates depend on them.

        Raises:
            typer.BadParameter: the folder's recipe differs.
        """
        path = work / "recipe.json"
        if path.exists():
            before = self.model_validate_json(path.read_text())
            for name, value in self.model_dump().items():
                if getattr(before, name) != value:
                    raise typer.BadParameter(
                        f"{name} must stay {getattr(before, name)} in {work}, got {value}: "
                        "choose another --work folder, or delete this one"
                    )
        write_json(path, self.model_dump())


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


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One training of a recipe; it continues from its checkpoint if there is one."""

    name: str
    steps: int
    """Optimizer steps in all."""
    seed: int
    """Of weights and batches."""
    folder: Path
    """Of the checkpoint `NAME.pt`; it is created if needed."""
    console: Console
    """Receives the progress."""

    def run(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_of: Callable[[torch.Generator], Float[Tensor, ""]],
        rate: Callable[[int, int], float],
        shift: int = 0,
        average: WeightAverage | None = None,
    ) -> None:
        """Take the optimizer steps that are left, and write checkpoints.

        Args:
            model: what is trained.
            optimizer: of the model's parameters.
            loss_of: draws a batch from an optimizer step's generator and returns its loss.
            rate: the learning rate of an optimizer step, by the step and the total number of steps.
            shift: added to the seed for the generators.
            average: updated after every optimizer step; None if the stage has none.
        """
        path = self.folder / f"{self.name}.pt"
        parts = {"model": model, "optimizer": optimizer} | ({"average": average} if average else {})
        start = _resume(path, parts)
        began = saved_at = time.monotonic()
        for step in range(start, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, self.steps)
            loss = loss_of(torch.Generator().manual_seed((self.seed + shift) * 1_000_003 + step))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if average:
                average.update(model, step)
            done = step + 1
            if done % max(self.steps // PLAIN_LINES, 1) == 0 or done == self.steps:
                seconds = (time.monotonic() - began) / (done - start)
                said = f"step {done}/{self.steps}, loss {loss.item():.4f}, {seconds:.3f} s per step"
                self.console.print(f"{self.name}: {said}")
            if time.monotonic() - saved_at > SAVE_EVERY_S or done == self.steps:
                _save(path, done, parts)
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
