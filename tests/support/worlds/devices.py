"""The devices on which a test computes. `python -m tests.support.worlds.devices` fails with one line without a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

NEEDS_GPU = "needs an NVIDIA GPU that torch finds (torch.cuda.is_available()); there, make gpu-test runs it"
"""Why a test with the marker `gpu` is skipped."""


@cache
def has_gpu() -> bool:
    """Whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


@contextmanager
def kernels_of_a_run(device: str) -> Iterator[None]:
    """Compute inside the block as the actors of a run do."""
    import torch

    from flow.device import computing
    from protocol.config.cluster import RoleConfig

    with computing(RoleConfig(gpus=float(device == "cuda"), threads=torch.get_num_threads())):
        yield


if __name__ == "__main__" and not has_gpu():
    import torch

    sys.exit(
        f"make gpu-test needs an NVIDIA GPU, got torch {torch.__version__} that finds none: run it where nvidia-smi"
        " lists one, with a torch that is built for CUDA"
    )
