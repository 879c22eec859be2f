"""The contract `Backbone` of a model family. A new family is one file that implements it; see `flow.models.load`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from protocol.messages import ConditionImage

EMBEDS = "encoder_hidden_states"
"""Name of the embeddings [B, tokens, D] whose prompts may differ in length."""
CONDITION = "condition_"
"""With a number of two digits: the names of the latents [B, C, h, w] of a prompt's condition images, in their order."""


@dataclass(frozen=True)
class Conditioning:
    """Text embeddings of a batch, and latents of its condition images; rows are prompts.

    `lengths` lie on the host, so no forward waits until the device tells how long its prompts are.
    """

    tensors: Mapping[str, Tensor]
    """By the name of the transformer's argument, each [B, ...]. `EMBEDS` is as long as the longest prompt; shorter ones
    end in zeros. Names that begin with `CONDITION` hold `conditions`."""
    lengths: tuple[int, ...]
    """Tokens of each row without these zeros."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Conditioning":
        """Return embeddings of prompts of one length, without padding."""
        rows, tokens = tensors[EMBEDS].shape[:2]
        return cls(tensors, (tokens,) * rows)

    def __len__(self) -> int:
        """Rows B."""
        return len(self.lengths)

    @property
    def texts(self) -> dict[str, Tensor]:
        """The tensors without the latents of condition images."""
        return {name: each for name, each in self.tensors.items() if not name.startswith(CONDITION)}

    @property
    def conditions(self) -> list[Float[Tensor, "B C h w"]]:
        """Latents of the condition images in their order."""
        return [self.tensors[name] for name in sorted(self.tensors) if name.startswith(CONDITION)]

    def given(self, conditions: Sequence[Float[Tensor, "B C h w"]]) -> "Conditioning":
        """Return the same rows with the latents of condition images."""
        named = {f"{CONDITION}{number:02d}": each.contiguous() for number, each in enumerate(conditions)}
        return Conditioning({**self.tensors, **named}, self.lengths)

    def rows(self, piece: slice) -> "Conditioning":
        """Return some of the rows, as long as the longest of them."""
        lengths = self.lengths[piece]
        tensors = {name: each[piece] for name, each in self.tensors.items()}
        return Conditioning({**tensors, EMBEDS: with_length(tensors[EMBEDS], max(lengths))}, lengths)

    def repeat(self, times: int) -> "Conditioning":
        """Copy the one prompt to `times` rows, as in diffusers' pipelines.

        With rows that are only expanded, torch multiplies in another order, which rounds differently on some CPUs.
        """
        tensors = {name: each.expand(times, *each.shape[1:]).contiguous() for name, each in self.tensors.items()}
        return Conditioning(tensors, self.lengths * times)

    def to(self, dtype: torch.dtype) -> "Conditioning":
        """Return the same rows in another dtype."""
        return Conditioning({name: each.to(dtype) for name, each in self.tensors.items()}, self.lengths)


@runtime_checkable
class Backbone(Protocol):
    """A pretrained flow-matching model that makes or edits images. It is frozen; an adapter is attached to
    `transformer`."""

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

    def encode(self, text: str, conditions: tuple[ConditionImage, ...] = ()) -> Conditioning:
        """Return one prompt's embeddings and the latents of its condition images.

        A prompt is encoded alone, so other prompts change no bit.
        """
        ...

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """Predict v = x_1 - x_0 without guidance.

        Args:
            latents: states x [B, C, H, W].
            sigma: noise level of each state, in [0, 1] [B].
            conditioning: embeddings with one row for each state.
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
            points: how many of the first rows are completed points, which a tiny decoder may decode.

        Raises:
            NonFiniteError: the latents are not finite, or the decoder overflows in float32 too.
        """
        ...

    def rest(self) -> None:
        """Keep transformer and VAE in host memory; call `wake` before the next computation."""
        ...

    def wake(self) -> None:
        """Move transformer and VAE back to the device."""
        ...


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Join rows to one batch, as long as its longest prompt; their condition images have the same sizes.

    Rollout and learner join the same prompts, so they compute with the same shapes and the ratio stays exactly 1.
    """
    lengths = tuple(length for each in conditionings for length in each.lengths)
    parts = {name: [each.tensors[name] for each in conditionings] for name in conditionings[0].tensors}
    parts[EMBEDS] = [with_length(each, max(lengths)) for each in parts[EMBEDS]]
    return Conditioning({name: torch.cat(each) for name, each in parts.items()}, lengths)


def with_length(embeds: Float[Tensor, "B tokens D"], tokens: int) -> Float[Tensor, "B {tokens} D"]:
    """Cut zeros off the end of embeddings, or append them."""
    missing = tokens - embeds.shape[1]
    return torch.nn.functional.pad(embeds, (0, 0, 0, missing)) if missing else embeds
