"""Keyed Gaussian noise: the key names the noise's purpose, and only the key decides its values.

The same key gives the same bits in any process, and different keys give independent noise. Noise is generated on the
CPU in float32 and then moved, so it does not depend on the device either. All sampling noise comes from here.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

INITIAL = -1
"""Step number in the key of a trajectory's initial noise."""
SHARED = -1
"""Member number in the key of noise that all members of a group share."""


def generator(*key: int | str) -> np.random.Generator:
    """Return the random number generator of this key: Philox with 128 bits of the key's sha256.

    torch's CPU generator would keep 32 bits of a seed.
    """
    digest = hashlib.sha256("|".join(str(part) for part in key).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


def normal(*key: int | str, shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Return standard normal float32 noise of this shape for this key."""
    return torch.from_numpy(generator(*key).standard_normal(tuple(shape), dtype=np.float32))


def trajectory_noise(
    *, seed: int, iteration: int, group: int, members: Sequence[int], step: int, shape: Sequence[int]
) -> Float[Tensor, "N ..."]:
    """Return the noise of one denoising step for some members of a group.

    Args:
        group: the group's index in its iteration.
        members: indices of the members in the group; `[SHARED]` for noise that all members share.
        step: denoising step k; `INITIAL` for the initial noise.
        shape: shape of one sample's latents, (C, H, W).

    Returns:
        Standard normal float32 noise [N, C, H, W], one row for each entry of `members`, on the CPU.
    """
    return torch.stack([normal("rollout", seed, iteration, group, m, step, shape=shape) for m in members])


def forward_noise(
    *, seed: int, iteration: int, group: int, members: Sequence[int], step: int, epoch: int, shape: Sequence[int]
) -> Float[Tensor, "N ..."]:
    """Return the noise that takes clean latents to the noise level of a step, independent of their rollout's.

    Args:
        group: the group's index in its iteration.
        step: denoising step k whose noise level is trained.
        epoch: pass over the iteration, from 0; each pass has its own noise.
        shape: shape of one sample's latents, (C, H, W).

    Returns:
        Standard normal float32 noise [N, C, H, W], one row for each entry of `members`, on the CPU.
    """
    return torch.stack([normal("forward", seed, iteration, group, m, step, epoch, shape=shape) for m in members])
