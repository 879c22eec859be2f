"""What the benchmarks of a GPU measure with: seconds, peak memory, and the time of kernels by kind."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "attention": ("attention", "flash", "fmha"),
    "norms": ("norm",),
    "products": ("::mm", "addmm", "bmm", "gemm", "nvjet", "cutlass", "splitk"),
}
"""By kind what the names of its kernels contain, or on a CPU those of its operations; the first match counts."""


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], *, rounds: int) -> float:
    """Return the mean wall-clock seconds of the work after a warm-up call."""
    work()
    wait()
    began = time.perf_counter()
    for _ in range(rounds):
        work()
    wait()
    return (time.perf_counter() - began) / rounds


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Yield a dict whose `gib` is, after the block, the peak of torch's GPU memory; NaN without a GPU."""
    found = {"gib": float("nan")}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield found
    if torch.cuda.is_available():
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30


def milliseconds_by_kind(work: Callable[[], Any], *, device: str) -> dict[str, float]:
    """Run the work under torch's profiler.

    Args:
        work: what is measured; it must have run before.
        device: `cuda` for the time of its kernels there, `cpu` for that of its operations.

    Returns:
        Milliseconds by kind, with `the rest`: element-wise operations, copies and reductions.
    """
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        wait()
    found = dict.fromkeys((*KINDS, "the rest"), 0.0)
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "the rest")
        found[kind] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
    return found
