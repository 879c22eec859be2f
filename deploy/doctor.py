"""What a person asks first when something does not work: versions, devices, and what a preset will cost.

A further check is a function that yields lines, added to `CHECKS`.
"""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from protocol.config import RunConfig

PACKAGES = ("torch", "diffusers", "transformers", "peft", "huggingface_hub", "ray", "numpy", "safetensors")


def versions(_: RunConfig | None) -> Iterator[str]:
    """Python and the libraries that decide results."""
    yield f"python {platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} is not installed"


def devices(_: RunConfig | None) -> Iterator[str]:
    """CPU threads and GPUs."""
    import torch

    yield f"torch uses {torch.get_num_threads()} CPU threads"
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield f"GPU {number}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        yield "no GPU that torch can use"


def costs(config: RunConfig | None) -> Iterator[str]:
    """Evaluations and memory of a preset."""
    if config is not None:
        from deploy.estimate import estimate

        yield from estimate(config).lines()


CHECKS: list[Callable[[RunConfig | None], Iterator[str]]] = [versions, devices, costs]


def report(config: RunConfig | None) -> Iterator[str]:
    """All checks' lines."""
    for check in CHECKS:
        yield from check(config)
