"""Schedules: grids of sigmas, float32 [T+1], falling from 1 to exactly 0.

Denoising step k goes from `sigmas[k]` to `sigmas[k + 1]`.
"""

import math
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Points = np.ndarray
Grid = TypeVar("Grid", Points, Tensor)


def sd3_sigmas(*, steps: int, shift: float = 3.0, train_timesteps: int = 1000) -> Float[Tensor, " points"]:
    """Return the grid of diffusers' FlowMatchEulerDiscreteScheduler as Stable Diffusion 3 uses it, shifted twice.

        S(u) = shift u / (1 + (shift - 1) u);  sigma_min = S(1/1000)
        sigma_k = S(u_k),  u = linspace(1, sigma_min, T);  sigma_T = 0

    The scheduler shifts sigma_min when it is made, and the grid once more when the steps are set. The order of float32
    and float64 operations follows the scheduler's, so that the grids are equal bit for bit.

    Args:
        steps: T, at least 1.
        shift: the scheduler config's `shift`.
        train_timesteps: the scheduler config's `num_train_timesteps`.

    Returns:
        Sigmas, float32 [T+1].
    """
    sigma_min = _shifted(torch.tensor([1.0]) / train_timesteps, shift).item()
    unshifted = np.linspace(1.0 * train_timesteps, sigma_min * train_timesteps, steps) / train_timesteps
    return _grid(_shifted(unshifted, shift))


def linear_sigmas(*, steps: int) -> Float[Tensor, " points"]:
    """Return the even grid sigma_k = 1 - k / T."""
    return torch.linspace(1.0, 0.0, steps + 1)


def shifted_sigmas(*, steps: int, shift: float = 3.0) -> Float[Tensor, " points"]:
    """Return the even grid shifted once: sigma_k = S(1 - k / T) with S(u) = shift u / (1 + (shift - 1) u).

    DanceGRPO and MixGRPO sample on this grid.
    """
    return _shifted(linear_sigmas(steps=steps), shift)


def flux_sigmas(
    *,
    steps: int,
    tokens: int,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    last: float | None = None,
) -> Float[Tensor, " points"]:
    """Return FLUX's grid; its shift grows with the size of the image.

        mu = base_shift + (max_shift - base_shift) (tokens - base_tokens) / (max_tokens - base_tokens)
        sigma_k = e^mu / (e^mu + 1 / u_k - 1),  u = linspace(1, 1/T, T);  sigma_T = 0

    Qwen-Image's is stretched around 1 until the smallest sigma above 0 is `last`: 1 - sigma_k grows by the factor
    (1 - last) / (1 - sigma_{T-1}).

    Args:
        steps: T, at least 1, and at least 2 with `last`.
        tokens: packed latent tokens of an image: (height / 16) (width / 16) for a size in pixels.
        base_tokens: the scheduler config's `base_image_seq_len`.
        max_tokens: the scheduler config's `max_image_seq_len`.
        base_shift: mu at `base_tokens`; the scheduler config's `base_shift`.
        max_shift: mu at `max_tokens`; the scheduler config's `max_shift`.
        last: the scheduler config's `shift_terminal`, 0.02 in Qwen-Image's; none does not stretch.

    Returns:
        Sigmas, float32 [T+1].
    """
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    shifted = _exponential(_even(steps), tokens * slope + (base_shift - slope * base_tokens))
    if last:
        below = 1 - shifted
        shifted = 1 - below / (below[-1] / (1 - last))
    return _grid(shifted)


def flux2_sigmas(*, steps: int, tokens: int) -> Float[Tensor, " points"]:
    """Return FLUX.2's grid; its mu grows with the size of the image, and below 4,300 tokens also falls with the steps.

    Two lines in the number of tokens were fitted, m(10) and m(200) for 10 and 200 steps. Below 4,300 tokens mu lies on
    the line through both at T, above it is m(200).

        sigma_k = e^mu / (e^mu + 1 / u_k - 1),  u = linspace(1, 1/T, T);  sigma_T = 0
        m(10) = 8.73809524e-05 tokens + 1.89833333,  m(200) = 0.00016927 tokens + 0.45666666

    Args:
        steps: T, at least 1.
        tokens: latent tokens of an image: (height / 16) (width / 16) for a size in pixels.

    Returns:
        Sigmas, float32 [T+1].
    """
    at_200 = 0.00016927 * tokens + 0.45666666
    slope = (at_200 - (8.73809524e-05 * tokens + 1.89833333)) / 190.0
    mu = at_200 if tokens > 4300 else slope * steps + (at_200 - 200.0 * slope)
    return _grid(_exponential(_even(steps), mu))


def static_sigmas(*, steps: int, shift: float = 1.0) -> Float[Tensor, " points"]:
    """Return the grid of FLUX.1-schnell: sigma_k = s u_k / (1 + (s - 1) u_k),  u = linspace(1, 1/T, T);  sigma_T = 0.

    Args:
        steps: T, at least 1.
        shift: s, the scheduler config's `shift`.
    """
    return _grid(_shifted(_even(steps), shift))


def z_image_sigmas(*, steps: int, shift: float = 6.0) -> Float[Tensor, " points"]:
    """Return Z-Image's grid: `static_sigmas`, from even sigmas that torch rounds instead of NumPy.

    Args:
        steps: T, at least 1.
        shift: s, the scheduler config's `shift`.
    """
    return _grid(_shifted(torch.linspace(1.0, 1 / steps, steps).numpy(), shift))


def _even(steps: int) -> Points:
    return np.linspace(1.0, 1 / steps, steps).astype(np.float32)


def _shifted(even: Grid, shift: float) -> Grid:
    return shift * even / (1 + (shift - 1) * even)  # pyrefly: ignore[bad-return]


def _exponential(even: Points, mu: float) -> Points:
    return math.exp(mu) / (math.exp(mu) + (1 / even - 1))


def _grid(points: Points) -> Float[Tensor, " points"]:
    return torch.cat([torch.from_numpy(points).to(torch.float32), torch.zeros(1)])
