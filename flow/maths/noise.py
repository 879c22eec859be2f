"""The only source of randomness: Gaussian noise keyed by what the noise is for, never by when or where it is drawn.

Two draws with the same key are equal bit for bit on any process; different keys are independent. Noise is always
drawn on the CPU in float32 and moved, so that it does not depend on the device either.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

INITIAL = -1
"""Stands for the step in the key of a trajectory's initial noise."""
SHARED = -1
"""Stands for the member in the key of noise that all members of a group share."""


def generator(*key: int | str) -> np.random.Generator:
    """The random numbers of this key: Philox with 128 bits of the key's sha256."""
    digest = hashlib.sha256("|".join(str(part) for part in key).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


def normal(*key: int | str, shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Standard normal float32 noise of this shape for this key."""
    return torch.from_numpy(generator(*key).standard_normal(tuple(shape), dtype=np.float32))


def trajectory_noise(
    *, seed: int, iteration: int, group: int, members: Sequence[int], step: int, shape: Sequence[int]
) -> Float[Tensor, "N ..."]:
    """Noise of one step for some members of a group; `INITIAL` as step gives the initial noise.

    Args:
        seed: the run's seed.
        group: the group's place in its iteration.
        members: member numbers; `[SHARED]` for noise that all members share.
        shape: shape of one sample's latents.
    """
    return torch.stack([normal("rollout", seed, iteration, group, m, step, shape=shape) for m in members])
