"""Both ends of the straight path x = (1 - sigma) x0 + sigma x1, computed from a state x and its velocity v = x1 - x0.

x0 = x - sigma v            the clean latents (Tweedie's estimate, if v is a model's velocity)
x1 = x + (1 - sigma) v      the noise
"""

from jaxtyping import Float
from torch import Tensor


def clean_estimate(
    *, latents: Float[Tensor, "B ..."], velocity: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """Estimate the clean latents: x0 = x - sigma v.

    Args:
        latents: states x [B, ...].
        velocity: v at these states [B, ...].
        sigma: noise level of each state, in [0, 1] [B].

    Returns:
        x0 [B, ...].
    """
    return latents - per_sample(sigma, latents) * velocity


def noise_estimate(
    *, latents: Float[Tensor, "B ..."], velocity: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """Estimate the noise: x1 = x + (1 - sigma) v.

    Args:
        latents: states x [B, ...].
        velocity: v at these states [B, ...].
        sigma: noise level of each state, in [0, 1] [B].

    Returns:
        x1 [B, ...].
    """
    return latents + per_sample(1 - sigma, latents) * velocity


def per_sample(scalar: Float[Tensor, " B"], like: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """Reshape one number per sample [B] to [B, 1, ...], so that it broadcasts over the latent dimensions of `like`."""
    return scalar.view(-1, *(1,) * (like.ndim - 1))
