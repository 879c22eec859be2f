"""The work of one call: its evaluations and images, and the seconds of its parts."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORK = "work/"
"""Prefix of the metrics that come from meters."""


class Meter:
    """Counts work, and times its parts on the device that does it.

        meter = Meter("cuda")
        with meter.timed("sampling"):
            ...
        meter.count("main_evaluations", 144)
        meter.read()     # {"work/sampling_seconds": 0.8, "work/main_evaluations": 144.0}

    On a GPU the seconds lie between two events of the stream, so only `read` waits for the device.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, name: str, number: float) -> None:
        self._counts[f"{WORK}{name}"] += number

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to a part."""
        name = f"{WORK}{part}_seconds"
        if self._is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._counts[name] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Return the sums so far by metric name, and reset them. On a GPU it waits for the parts to end."""
        for name, begin, end in self._spans:
            end.synchronize()
            self._counts[name] += begin.elapsed_time(end) / 1000
        held = dict(self._counts)
        self._spans.clear()
        self._counts.clear()
        return held
