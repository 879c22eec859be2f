"""Where and on how many threads torch computes: the device of a role, and the CPU threads of a process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protocol.config.cluster import RoleConfig
from protocol.errors import ConfigError


def device_of(role: RoleConfig) -> str:
    """Return `cuda` if the role reserves a GPU, otherwise `cpu`.

    Raises:
        ConfigError: the role reserves a GPU, but torch finds none.
    """
    if role.gpus and not torch.cuda.is_available():
        raise ConfigError(f"cluster.*.gpus must be 0 where torch finds no GPU, got {role.gpus:g}")
    return "cuda" if role.gpus else "cpu"


def best_device() -> str:
    """Return `cuda` if torch finds a GPU, otherwise `cpu`; for commands that compute in their own process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute on `count` CPU threads inside the block.

    The number of threads is part of a run's definition, since it decides the order of floating-point sums.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
