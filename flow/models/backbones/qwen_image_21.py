"""The Qwen-Image-2.1 family, of 7 billion parameters. It is sampled without guidance; its prompts differ in length.

Latents are [B, C, H, W] as everywhere; each is one token of the transformer, after the prompt's. A prompt's token
attends to the tokens before it, an image's token to all, and a prompt is modulated as at sigma 0. The VAE is a video
VAE with four channels, of which alpha is dropped.
"""

from functools import partial
from itertools import groupby
from types import MethodType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flow.models.backbones.flux import dynamic_sigmas
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import QWEN_IMAGE_21
from flow.models.located import SIDE
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig
from protocol.errors import ModelError

COLORS = 3
"""Channels of an image without alpha."""


class QwenImage21(PipelineBackbone):
    """A `QwenImage21Pipeline` as a `Backbone`, for prompts without images."""

    family = QWEN_IMAGE_21
    schedule_options = frozenset({"use_dynamic_shifting", "shift_terminal"})

    def __init__(self, pipeline: Any, *args: Any, **kwargs: Any) -> None:
        pipeline.transformer.forward = MethodType(_forward, pipeline.transformer)
        super().__init__(pipeline, *args, **kwargs)

    @staticmethod
    @torch.no_grad()
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with the pipeline's Qwen3-VL.

        Args:
            config: its `max_sequence_length` is the limit of a prompt's tokens, chat template included; longer ones are
                cut here, since the pipeline cuts none.

        Returns:
            Embeddings [1, tokens, D].
        """
        embeds, _, _ = pipeline.encode_prompt(prompt=text, device=device)
        return Conditioning.of({EMBEDS: cast(Tensor, embeds)[:, : config.max_sequence_length]})

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the scheduler's schedule: its shift depends on the number of tokens.

        Raises:
            ModelError: the shift is another, or fewer than two steps were asked for.
        """
        settings, (_, height, width) = self._pipeline.scheduler.config, self.latent_shape
        if steps < 2 or not settings.use_dynamic_shifting:
            raise ModelError(f"Qwen-Image-2.1's schedule needs at least 2 steps and a dynamic shift, got {steps} steps")
        return dynamic_sigmas(settings, steps=steps, tokens=height * width)

    def _example_words(self, count: int) -> Conditioning:
        """Return random embeddings of `count` prompts of the greatest length."""
        width, length = self._pipeline.transformer.config.context_in_dim, self._config.max_sequence_length
        return Conditioning.of({EMBEDS: torch.randn(count, length, width, device=self._device)})

    def pixels(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 3 height width"]:
        """Undo the normalisation by channel, decode one frame, and drop its alpha."""
        settings, scaled = self.vae.config, latents.to(self._vae_dtype)
        mean, std = (
            torch.tensor(each, device=scaled.device, dtype=scaled.dtype)[:, None, None]
            for each in (settings.latents_mean, settings.latents_std)
        )
        return self.vae.decode((scaled * std + mean)[:, :, None], return_dict=False)[0][:, :COLORS, 0]

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        timesteps = self._pipeline.scheduler.config.num_train_timesteps
        times = (sigma * timesteps).to(latents.dtype) / 1000  # the pipeline rounds both times
        # The image's position is the prompt's length, so each run of rows of one length is a batch, without padding.
        velocities, start = [], 0
        for length, run in groupby(conditioning.lengths):
            rows = slice(start, start := start + len(tuple(run)))
            velocities.append(self.transformer(latents[rows], conditioning.tensors[EMBEDS][rows, :length], times[rows]))
        return torch.cat(velocities)

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        return self._pipeline.transformer.config.in_channels, *self._divided(height or SIDE, width or SIDE)


def _forward(
    transformer: Any, latents: Float[Tensor, "B C H W"], embeds: Float[Tensor, "B text D"], times: Float[Tensor, " B"]
) -> Float[Tensor, "B C H W"]:
    """Do what `QwenImage21Transformer2DModel.forward` does with prompts of one length and an image to draw.

    That finds the image in a mask, whose values the CPU would wait for in every forward; here it comes last.
    """
    (_, _, height, width), text = latents.shape, embeds.shape[1]
    tokens = latents.flatten(2).transpose(1, 2)
    hidden = torch.cat([transformer.txt_in(embeds), transformer.img_in(tokens)], dim=1)
    is_image = None
    if transformer.config.causal_condition:
        is_image = torch.arange(hidden.shape[1], device=latents.device) >= text
        times = torch.cat([times, times.new_zeros(1)])  # the last one is the prompts'
    times = transformer.time_text_embed(times.to(hidden.dtype), hidden)
    rotations = _rotations(transformer.pos_embed, text, height, width, latents.device)
    # A block's arguments: None for KV caches, for padding, and for the mask of another kernel.
    others = transformer.modulation(times), rotations, None, is_image, None, None, None, [(0, text, True)]
    is_checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
    for block in transformer.transformer_blocks:
        run = partial(transformer._gradient_checkpointing_func, block) if is_checkpointed else block
        hidden = run(hidden, *others)
    velocity = transformer.proj_out(transformer.norm_out(hidden, times, is_image))[:, text:]
    return velocity.transpose(1, 2).unflatten(2, (height, width))


def _rotations(embedding: Any, text: int, height: int, width: int, device: torch.device) -> Tensor:
    """Return the complex rotations of every token [tokens, D / 2].

    The prompt's tokens count on all three axes; the image's have the next number, and rows and columns around 0.
    """
    embedding.freqs = [each.to(device) for each in embedding.freqs]
    prompt, image = torch.arange(text, device=device), torch.full((height * width,), text, device=device)
    rows, columns = (torch.arange(side // 2 - side, side // 2, device=device) for side in (height, width))
    axes = image, rows.repeat_interleave(width), columns.repeat(height)
    return torch.cat(
        [table[torch.cat([prompt, axis])] for table, axis in zip(embedding.freqs, axes, strict=True)], dim=-1
    )
