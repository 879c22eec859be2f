"""The Stable Diffusion 3 family: SD3-Medium, SD3.5-Medium and -Large, with or without their T5."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flow.maths.schedule import sd3_sigmas
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import SD3
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig


class StableDiffusion3(PipelineBackbone):
    """A `StableDiffusion3Pipeline` as a `Backbone`."""

    family = SD3

    @staticmethod
    @torch.no_grad()
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with the pipeline's text encoders; zeros replace the tokens of an absent T5.

        Args:
            config: its `max_sequence_length` is T5's number of tokens.

        Returns:
            Prompt embeddings [1, L, D] and pooled projections [1, P].
        """
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=text,
            prompt_2=text,
            prompt_3=text,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=config.max_sequence_length,
        )
        return Conditioning.of({EMBEDS: cast(Tensor, embeds), "pooled_projections": cast(Tensor, pooled)})

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the twice shifted schedule with the shift of the model's scheduler config."""
        scheduler = self._pipeline.scheduler.config
        return sd3_sigmas(steps=steps, shift=scheduler.shift, train_timesteps=scheduler.num_train_timesteps)

    def _example_words(self, count: int) -> Conditioning:
        """Return random embeddings (CLIP's tokens, then T5's) and pooled projections of `count` prompts."""
        settings = self._pipeline.transformer.config
        length = self._pipeline.tokenizer_max_length + self._config.max_sequence_length
        embeds = torch.randn(count, length, settings.joint_attention_dim, device=self._device)
        pooled = torch.randn(count, settings.pooled_projection_dim, device=self._device)
        return Conditioning.of({EMBEDS: embeds, "pooled_projections": pooled})

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        timestep = sigma * self._pipeline.scheduler.config.num_train_timesteps
        return self.transformer(hidden_states=latents, timestep=timestep, return_dict=False, **conditioning.tensors)[0]

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        return self._pipeline.transformer.config.in_channels, *self._divided(height, width)
