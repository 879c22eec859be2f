"""Where and on how many threads torch computes: the device of a role, and the CPU threads of a process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

import torch

from protocol.config.cluster import RoleConfig
from protocol.errors import ConfigError, InputError


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


CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment that cuBLAS needs for equal bits in every run; it must be set before the process starts."""


def compute_deterministically(device: str) -> None:
    """Let torch choose GPU kernels that give the same bits every time, and warn where there is none."""
    if device == "cuda":
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def computing_facts(device: str) -> dict[str, str]:
    """Return what the bits of a computation depend on: the device's model and the libraries' versions."""
    model = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = {package: version(package) for package in ("torch", "diffusers", "transformers", "peft", "numpy")}
    return {"GPU" if device == "cuda" else "CPU": model, **versions, "CUDA": str(torch.version.cuda)}


def require_same_facts(first: Mapping[str, str], other: Mapping[str, str], *, who: str) -> None:
    """Refuse a process that would round differently.

    Args:
        first: `computing_facts` of the process that sets the rule.
        other: of the process that joins it.
        who: the process that joins, for the message.

    Raises:
        InputError: they differ; the message names both values.
    """
    odd = [f"{name} {other.get(name)} instead of {held}" for name, held in first.items() if other.get(name) != held]
    if odd:
        raise InputError(
            f"all learner workers must have the same device model and library versions, got {who} with"
            f" {', '.join(odd)}: give them equal nodes, or set cluster.learner.workers=1"
        )
