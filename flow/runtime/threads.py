"""How many CPU threads torch uses: part of a run's definition, since the order of sums depends on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch computes on `count` threads of the calling thread's own team."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
