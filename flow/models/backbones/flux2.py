"""The FLUX.2-klein family: the base models of 4 and 9 billion parameters, and their distilled versions.

Latents are the pipeline's packed ones, [B, 4 C, H / 2, W / 2], one token for each position. The VAE's batch norm
normalises them; decoding undoes it. Guidance is classifier-free; the pipeline's own negative prompt is always "". The
tokens of condition images follow the tokens of the latents, each image in a frame of its own.
"""

import math
from typing import Any, cast

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flow.maths.schedule import flux2_sigmas, static_sigmas
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import FLUX2_KLEIN
from flow.models.located import PACK, Sizes
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig

FRAMES_APART = 10
"""Frames from the image that is made to the first condition image, and from that to the next."""


class Flux2Klein(PipelineBackbone):
    """A `Flux2KleinPipeline` as a `Backbone`."""

    family = FLUX2_KLEIN
    schedule_options = frozenset({"use_dynamic_shifting"})

    @staticmethod
    @torch.no_grad()
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with three layers of the pipeline's Qwen3.

        Args:
            config: its `max_sequence_length` is the number of tokens L, with padding and chat template.

        Returns:
            Embeddings [1, L, 3 D]. The model attends to the padding too, so it counts as tokens.
        """
        embeds, _ = pipeline.encode_prompt(prompt=text, device=device, max_sequence_length=config.max_sequence_length)
        return Conditioning.of({EMBEDS: cast(Tensor, embeds)})

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the scheduler's schedule: its shift depends on the number of tokens and of steps."""
        settings, (_, height, width) = self._pipeline.scheduler.config, self.latent_shape
        if not settings.use_dynamic_shifting:
            return static_sigmas(steps=steps, shift=settings.shift)
        return flux2_sigmas(steps=steps, tokens=height * width)

    @classmethod
    def condition_size(cls, width: int, height: int, *, side: int, sizes: Sizes) -> tuple[int, int]:
        """Keep the ratio of the sides of an image whose area is larger; any other keeps its size."""
        del sizes
        scale = min(1.0, math.sqrt(side * side / (width * height)))
        return int(width * scale), int(height * scale)

    @classmethod
    def prepared(cls, pipeline: Any, image: Image.Image, size: tuple[int, int], sizes: Sizes) -> Tensor:
        """Resize an image, then cut its edges off to whole tokens."""
        width, height = map(sizes.whole, size)
        resized = image.resize(size, Image.Resampling.LANCZOS)
        return pipeline.image_processor.preprocess(resized, height, width, resize_mode="crop")

    def pixels(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 3 height width"]:
        """Undo the batch norm's normalisation and the packing, and decode."""
        mean, variance = (each.view(1, -1, 1, 1) for each in (self.vae.bn.running_mean, self.vae.bn.running_var))
        std = torch.sqrt(variance + self.vae.config.batch_norm_eps)
        unpacked = torch.nn.functional.pixel_shuffle(latents * std.to(latents.dtype) + mean.to(latents.dtype), PACK)
        return self.vae.decode(unpacked.to(self._vae_dtype), return_dict=False)[0]

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        _, _, height, width = latents.shape
        timesteps = self._pipeline.scheduler.config.num_train_timesteps
        images = [latents, *conditioning.conditions]
        frames = [_positions(1, *each.shape[2:], 1, device=latents.device) for each in images]
        for number, frame in enumerate(frames):
            frame[:, 0] = FRAMES_APART * number
        predicted = self.transformer(
            hidden_states=torch.cat([each.flatten(2).transpose(1, 2) for each in images], dim=1),
            timestep=(sigma * timesteps).to(latents.dtype) / 1000,  # the pipeline rounds both times
            guidance=None,
            img_ids=torch.cat(frames),
            txt_ids=_positions(1, 1, 1, conditioning.lengths[0], device=latents.device),
            return_dict=False,
            **conditioning.texts,
        )[0]
        return predicted[:, : height * width].transpose(1, 2).unflatten(2, (height, width))

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        rows, columns = self._divided(height, width)
        return self._pipeline.transformer.config.in_channels, rows // PACK, columns // PACK


def _positions(*sizes: int, device: torch.device) -> Float[Tensor, "tokens 4"]:
    """Return frame, row, column and text position of every token."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))
