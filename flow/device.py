"""Where and how torch computes: the device of a role, a process's CPU threads, and kernels that give equal bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from threading import Lock

import torch

from flowcredit.code import CODE, code_digest
from protocol.config.cluster import RoleConfig
from protocol.errors import ConfigError


def device_of(role: RoleConfig) -> str:
    """Return `cuda` if the role reserves a GPU, otherwise `cpu`.

    Raises:
        ConfigError: the role reserves a GPU, but torch finds none, or fewer than it reserves.
    """
    if role.gpus and not torch.cuda.is_available():
        raise ConfigError(f"cluster.*.gpus must be 0 where torch finds no GPU, got {role.gpus:g}")
    if role.gpus > 1 and torch.cuda.device_count() < role.gpus:
        raise ConfigError(
            f"cluster.*.gpus must be at most {torch.cuda.device_count()}, the GPUs that torch finds, got {role.gpus:g}"
        )
    return "cuda" if role.gpus else "cpu"


def devices_of(role: RoleConfig) -> list[str]:
    """Return the devices of a role; several share the blocks of its model.

    Raises:
        ConfigError: as in `device_of`.
    """
    return [device_of(role), *(f"cuda:{index}" for index in range(1, int(role.gpus)))]


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
"""Environment that cuBLAS needs for equal bits in every run. The size of its workspace decides which kernel it takes,
so rollout actors and learner workers must have the same."""


def take_device(role: RoleConfig) -> str:
    """Return the device of a rollout or learner role, and let this process compute with equal bits there.

    On a GPU torch then takes only kernels that give the same bits every time; an operation that has none raises
    RuntimeError. With torch's `warn_only` the backward of attention would still add in any order. Both roles must call
    this: a replay is exact only if both sides have the same kernels.

    Raises:
        ConfigError: the role reserves a GPU, but torch finds none.
    """
    device = device_of(role)
    if device == "cuda":
        os.environ.update(CUBLAS)
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]
        torch.backends.cudnn.benchmark = False
    return device


KERNELS = Lock()
"""Held by a computation in this process that chooses its kernels, since torch has one choice for all threads. So a
run that an interrupt has ended, and a scorer beside a run, put their choice back before another computation begins."""


@contextmanager
def tf32(device: str) -> Iterator[None]:
    """Multiply float32 matrices on a GPU in TF32 (10 bits of mantissa) inside the block; nothing changes on a CPU.

    torch's convolutions do so by default. A transformer in half precision has no product in float32
    (`tests/flow/models/test_precision.py`), so there it would save nothing.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    with KERNELS:
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            yield
        finally:
            matmul.fp32_precision = before


@contextmanager
def computing(role: RoleConfig) -> Iterator[None]:
    """Compute inside the block as an actor of a rollout or learner role does in a process of its own."""
    before = torch.are_deterministic_algorithms_enabled()
    with torch_threads(role.threads):
        take_device(role)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode=before)


def computing_facts(device: str) -> dict[str, str]:
    """Return what the bits of a computation depend on: the device's model, the libraries' versions and our code."""
    return {**device_facts(device), **library_facts()}


def device_facts(device: str) -> dict[str, str]:
    """Return the model of the GPU, or the instruction set that torch uses on the CPU."""
    model = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"GPU" if device == "cuda" else "CPU": model}


@cache
def versions_of(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


@cache
def library_facts() -> dict[str, str]:
    """Return the versions of the libraries that compute, and a digest of our own code that computes.

    Every call gives the answer of the first one: the driver compares every joining actor with it.
    """
    versions = versions_of("torch", "diffusers", "transformers", "peft", "numpy")
    return {**versions, "CUDA": str(torch.version.cuda), CODE: code_digest()}
