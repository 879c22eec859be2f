"""The Z-Image family: the base model, and Turbo, which is distilled. Its prompts differ in length.

`model.guidance` is w in v_u + w (v_c - v_u), as for every family; the pipeline's `guidance_scale` is w - 1.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flow.maths.schedule import z_image_sigmas
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import Z_IMAGE
from flow.models.located import SIDE
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig


class ZImage(PipelineBackbone):
    """A `ZImagePipeline` as a `Backbone`."""

    family = Z_IMAGE

    @staticmethod
    @torch.no_grad()
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with the pipeline's Qwen3.

        Args:
            config: its `max_sequence_length` is the limit of a prompt's tokens, chat template included.

        Returns:
            Embeddings [1, tokens, D].
        """
        (embeds,), _ = pipeline.encode_prompt(
            prompt=text,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=config.max_sequence_length,
        )
        return Conditioning.of({EMBEDS: cast(Tensor, embeds)[None]})

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the schedule with the shift of the model's scheduler config."""
        return z_image_sigmas(steps=steps, shift=self._pipeline.scheduler.config.shift)

    def _example_words(self, count: int) -> Conditioning:
        """Return random embeddings of `count` prompts of the greatest length."""
        width, length = self._pipeline.transformer.config.cap_feat_dim, self._config.max_sequence_length
        return Conditioning.of({EMBEDS: torch.randn(count, length, width, device=self._device)})

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        timesteps = self._pipeline.scheduler.config.num_train_timesteps
        predicted = self.transformer(
            list(latents.to(self._dtype).unsqueeze(2)),
            (timesteps - sigma * timesteps) / timesteps,
            [row[:length] for row, length in zip(conditioning.tensors[EMBEDS], conditioning.lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(predicted).squeeze(2)

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        return self._pipeline.transformer.config.in_channels, *self._divided(height or SIDE, width or SIDE)
