"""The parts of `benchmarks.speed.slot`: each function measures one thing and yields its figures as it finds them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from protocol.errors import one_line

Figures = Mapping[str, float | str | None]


@dataclass(frozen=True)
class Where:
    """Where a part computes."""

    device: Literal["cuda", "cpu"]
    is_tiny: bool
    """Whether sizes are so small that a CPU takes seconds."""


def tried(name: str, work: Callable[[], Figures]) -> Figures:
    """Return the figures of the work with the name before each; if it fails, only its error."""
    try:
        return {f"{name}, {figure}": value for figure, value in work().items()}
    except Exception as error:  # noqa: BLE001 the next measurement may work
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {f"{name}, error": f"{type(error).__name__}: {one_line(error)}"}
