"""Where a role's model lives: on the CPU, or on the GPU that its config reserves."""

import torch

from protocol.config.cluster import RoleConfig
from protocol.errors import ConfigError


def device_of(role: RoleConfig) -> str:
    """`cuda` when the role reserves a GPU, otherwise `cpu`.

    Raises:
        ConfigError: a GPU is reserved where torch finds none.
    """
    if role.gpus and not torch.cuda.is_available():
        raise ConfigError(f"cluster.*.gpus must be 0 where torch finds no GPU, got {role.gpus:g}")
    return "cuda" if role.gpus else "cpu"


def best_device() -> str:
    """Return the GPU if torch finds one, otherwise the CPU, for work that no role's config places."""
    return "cuda" if torch.cuda.is_available() else "cpu"
