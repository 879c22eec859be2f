"""What a model family must answer. A new family is one file that implements `Backbone`; `flow.models.load` loads it."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

Conditioning = Mapping[str, Tensor]
"""A family's text embeddings by name, each [B, ...]; rows are prompts."""


@runtime_checkable
class Backbone(Protocol):
    """A pretrained flow-matching text-to-image model, frozen; an adapter is attached to `transformer`."""

    transformer: nn.Module
    latent_shape: tuple[int, int, int]
    """C, H, W of one sample's latents."""

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """The family's own schedule."""
        ...

    def encode(self, text: str) -> Conditioning:
        """One prompt's embeddings, each [1, ...]; always encoded alone, so that no neighbour changes a bit."""
        ...

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """v = x_1 - x_0 as the model predicts it, float32, without guidance."""
        ...

    def decode(self, latents: Float[Tensor, "B C H W"]) -> UInt8[np.ndarray, "B height width 3"]:
        """Images of clean latents, as the family's pipeline makes them."""
        ...


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Embeddings of several prompts as rows of one batch."""
    return {name: torch.cat([each[name] for each in conditionings]) for name in conditionings[0]}


def repeat(conditioning: Conditioning, times: int) -> Conditioning:
    """One prompt's embeddings for `times` samples of it."""
    return {name: tensor.expand(times, *tensor.shape[1:]) for name, tensor in conditioning.items()}
