"""The straight path x = (1 - sigma) x0 + sigma x1 with v = x1 - x0, read backwards: from a state to its two ends.

x0 = x - sigma v            the clean latents (Tweedie's estimate, when v is a model's velocity)
x1 = x + (1 - sigma) v      the noise
"""

from jaxtyping import Float
from torch import Tensor


def clean_estimate(
    *, latents: Float[Tensor, "B ..."], velocity: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """x0 = x - sigma v."""
    return latents - per_sample(sigma, latents) * velocity


def noise_estimate(
    *, latents: Float[Tensor, "B ..."], velocity: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """x1 = x + (1 - sigma) v."""
    return latents + per_sample(1 - sigma, latents) * velocity


def per_sample(scalar: Float[Tensor, " B"], like: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """One number per sample, shaped to broadcast over the latent dimensions of `like`."""
    return scalar.view(-1, *(1,) * (like.ndim - 1))
