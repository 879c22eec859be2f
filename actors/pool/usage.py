"""What a process uses: its memory, and the memory and time of its GPU as NVML tells them."""

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
    share = _told(lambda: torch.cuda.utilization(0))
    return Usage(
        memory_bytes=memory,
        gpu_memory_bytes=_told(lambda: torch.cuda.device_memory_used(0)),
        gpu_share=None if share is None else share / 100,
    )


def _told(ask: Callable[[], Value]) -> Value | None:
    """Return what NVML tells; None without its package, and for what it does not tell, as of a part of a GPU (MIG)."""
    with suppress(Exception):
        return ask()
    return None
