"""What a process uses: its memory, and by NVML the memory and time of its GPU."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

from protocol.status import Usage

Value = TypeVar("Value")


def usage() -> Usage:
    """Measure this process. Without CUDA, or without the package nvidia-ml-py, its GPU is not known."""
    memory = psutil.Process().memory_info().rss
    torch = sys.modules.get("torch")  # many scorers do not need it
    if torch is None or not torch.cuda.is_initialized():
        return Usage(memory_bytes=memory)
    share = _by_nvml(lambda: torch.cuda.utilization(0))
    return Usage(
        memory_bytes=memory,
        gpu_memory_bytes=_by_nvml(lambda: torch.cuda.device_memory_used(0)),
        gpu_share=None if share is None else share / 100,
    )


def _by_nvml(measure: Callable[[], Value]) -> Value | None:
    """Return a measurement; None without NVML's package, or where NVML has none, as for a part of a GPU (MIG)."""
    with suppress(Exception):
        return measure()
    return None
