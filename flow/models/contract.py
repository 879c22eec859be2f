"""The contract `Backbone` of a model family. A new family is one file that implements it; see `flow.models.load`."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

Conditioning = Mapping[str, Tensor]
"""A family's text embeddings by name, each [B, ...]; rows are prompts. Every prompt has the same
shapes; a family whose prompts differ in length pads them, see `flow.models.padding`."""


@runtime_checkable
class Backbone(Protocol):
    """A pretrained flow-matching text-to-image model. It is frozen; an adapter is attached to `transformer`."""

    transformer: nn.Module
    latent_shape: tuple[int, int, int]
    """C, H, W of one sample's latents."""
    decoded_again: int
    """Images so far whose decoding overflowed in half precision, so that they were decoded again in float32."""

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the family's own schedule for T = `steps` denoising steps, [T+1]."""
        ...

    def sized(self, height: int, width: int) -> "Backbone":
        """Return this model with the latent shape and the schedule of another size in pixels; both share all weights.

        Raises:
            ModelError: the model cannot generate images of this size.
        """
        ...

    def encode(self, text: str) -> Conditioning:
        """Return one prompt's embeddings, each [1, ...]. A prompt is encoded alone, so other prompts change no bit."""
        ...

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """Predict v = x_1 - x_0 without guidance.

        Args:
            latents: states x [B, C, H, W].
            sigma: noise level of each state, in [0, 1] [B].
            conditioning: embeddings with one row for each state.

        Returns:
            The velocity, float32 [B, C, H, W].
        """
        ...

    def guide(
        self, without: Float[Tensor, "B C H W"], toward: Float[Tensor, "B C H W"], weight: float
    ) -> Float[Tensor, "B C H W"]:
        """Combine the velocities of the two branches of classifier-free guidance as the family's pipeline does.

        Args:
            without: v_u, of the negative prompt.
            toward: v_c, of the prompt.
            weight: w, above 1.

        Returns:
            The guided velocity; in most families v_u + w (v_c - v_u).
        """
        ...

    def decode(self, latents: Float[Tensor, "B C H W"], *, points: int = 0) -> UInt8[np.ndarray, "B height width 3"]:
        """Decode clean latents to images, with the rounding of the family's pipeline.

        Args:
            latents: clean latents [B, C, H, W].
            points: how many of the first rows are completed points, which a tiny decoder may decode.

        Returns:
            The images, uint8 [B, height, width, 3].

        Raises:
            NonFiniteError: the latents are not finite, or the decoder overflows in float32 too.
        """
        ...

    def rest(self) -> None:
        """Move transformer and VAE to host memory; call `wake` before the next computation."""
        ...

    def wake(self) -> None:
        """Move transformer and VAE back to the device."""
        ...


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Stack the embeddings of several prompts as rows of one batch."""
    return {name: torch.cat([each[name] for each in conditionings]) for name in conditionings[0]}


def repeat(conditioning: Conditioning, times: int) -> Conditioning:
    """Copy one prompt's embeddings to `times` rows, as in diffusers' pipelines.

    With rows that are only expanded, torch multiplies in another order, which rounds differently on some CPUs.
    """
    return {name: tensor.expand(times, *tensor.shape[1:]).contiguous() for name, tensor in conditioning.items()}
