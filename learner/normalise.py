"""From the step rewards of one group to advantages, float32 [N, S]; 0 where a step reward is invalid."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Normaliser = Callable[..., Float[Tensor, "N S"]]


def joint(values: Float[Tensor, "N S"], valid: Bool[Tensor, "N S"], *, epsilon: float) -> Float[Tensor, "N S"]:
    """A = (g - m) / (s + epsilon) with mean m and std s (ddof 0) over all valid members and steps of the group.

    Stepwise-Flow-GRPO (arXiv 2603.28718); on `uniform` step rewards it is Flow-GRPO's per-prompt normalisation
    (arXiv 2505.05470). Statistics are taken in float64. A group whose valid values are all equal has nothing to
    compare: its advantages are exactly 0.

    Args:
        epsilon: added to the std; 1e-4 in Flow-GRPO.
    """
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    kept = values[valid].double()
    if len(kept) and kept.max() > kept.min():
        advantages[valid] = (kept - kept.mean()) / (kept.std(correction=0) + epsilon)
    return advantages.float()


NORMALISERS: Mapping[str, Normaliser] = {"joint": joint}
"""Normaliser by its name in the config."""
