"""The Qwen-Image family. Its guided velocity keeps the norm of the conditional one, and its prompts differ in length.

Latents are [B, C, H, W] as everywhere; the transformer receives them packed like FLUX.1's. The VAE is a video VAE: an
image is a video of one frame, and each channel has its own mean and std.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flow.models.backbones.flux import PackedBackbone, pack, unpack
from flow.models.contract import EMBEDS, Conditioning, with_length
from flow.models.families import QWEN_IMAGE
from flow.models.located import PACK
from protocol.config.model import ModelConfig
from protocol.errors import ModelError

SHORTEST = 64
"""Tokens of the shortest embeddings of compiled blocks."""


class QwenImage(PackedBackbone):
    """A `QwenImagePipeline` as a `Backbone`."""

    family = QWEN_IMAGE
    schedule_options = frozenset({"use_dynamic_shifting", "shift_terminal"})

    @staticmethod
    @torch.no_grad()
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with the pipeline's Qwen2.5-VL.

        Args:
            config: its `max_sequence_length`, at most 1024, is the limit of a prompt's tokens; longer ones are cut.

        Returns:
            Embeddings [1, tokens, D].
        """
        embeds, _ = pipeline.encode_prompt(prompt=text, device=device, max_sequence_length=config.max_sequence_length)
        return Conditioning.of({EMBEDS: cast(Tensor, embeds)})

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the scheduler's schedule: its shift depends on the number of tokens.

        Raises:
            ModelError: a schedule that ends at a fixed sigma was asked for fewer than two steps.
        """
        settings = self._pipeline.scheduler.config
        if settings.shift_terminal and (steps < 2 or not settings.use_dynamic_shifting):
            raise ModelError(f"Qwen-Image's schedule needs at least 2 steps and a dynamic shift, got {steps} steps")
        return super().sigmas(steps)

    def guide(
        self, without: Float[Tensor, "B C H W"], toward: Float[Tensor, "B C H W"], weight: float
    ) -> Float[Tensor, "B C H W"]:
        """Combine the two branches as in every family, then give every token the norm of the conditional branch.

        Returns:
            v |v_c| / |v| with v = v_u + w (v_c - v_u) and the norms of each 2 x 2 block of latents.
        """
        combined, wanted = pack(super().guide(without, toward, weight)), pack(toward)
        norms = (torch.norm(each, dim=-1, keepdim=True) for each in (wanted, combined))
        return unpack(combined * torch.div(*norms), height=toward.shape[2], width=toward.shape[3])

    def pixels(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 3 height width"]:
        """Undo the normalisation by channel and decode one frame."""
        settings = self.vae.config
        mean, std = (
            torch.tensor(each, device=latents.device)[:, None, None, None]
            for each in (settings.latents_mean, settings.latents_std)
        )
        scaled = latents[:, :, None] / (1.0 / std) + mean
        return self.vae.decode(scaled.to(self._vae_dtype), return_dict=False)[0][:, :, 0]

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        count, _, height, width = latents.shape
        embeds, lengths = conditioning.tensors[EMBEDS], conditioning.lengths
        if self._config.compile:  # each length has its own graphs, so there are few of them: 64, 128, 256 ...
            embeds = with_length(embeds, max(SHORTEST, 1 << (max(lengths) - 1).bit_length()))
        mask = None
        if min(lengths) < embeds.shape[1]:
            positions = torch.arange(embeds.shape[1], device=latents.device)
            mask = torch.stack([positions < length for length in lengths])  # a tensor of lengths would be copied over
        timesteps = self._pipeline.scheduler.config.num_train_timesteps
        images = [latents, *conditioning.conditions]
        predicted = self.transformer(
            hidden_states=torch.cat([pack(each) for each in images], dim=1),
            timestep=(sigma * timesteps).to(latents.dtype) / 1000,  # the pipeline rounds both times
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, each.shape[2] // PACK, each.shape[3] // PACK) for each in images]] * count,
            return_dict=False,
        )[0]
        tokens = (height // PACK) * (width // PACK)
        return unpack(predicted[:, :tokens], height=height, width=width)
