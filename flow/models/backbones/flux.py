"""The FLUX.1 family: dev, which takes guidance as a model input, and schnell, which does not.

Latents are [B, C, H, W] as everywhere; the transformer receives them packed, one token for each 2 x 2 block.
Classifier-free guidance (`model.guidance` above 1) with a negative prompt is the pipeline's "true CFG".
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flow.maths.schedule import flux_sigmas, static_sigmas
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import FLUX
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig

PACK = 2
"""Height and width of a token's block, in latents."""


class PackedBackbone(PipelineBackbone):
    """A family whose transformer takes packed latents, and whose schedule depends on their number."""

    schedule_options = frozenset({"use_dynamic_shifting"})

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the scheduler's schedule: its shift depends on the number of tokens, or is fixed (schnell)."""
        settings = self._pipeline.scheduler.config
        _, height, width = self.latent_shape
        if not settings.use_dynamic_shifting:
            return static_sigmas(steps=steps, shift=settings.shift)
        return dynamic_sigmas(settings, steps=steps, tokens=(height // PACK) * (width // PACK))

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        return self._pipeline.transformer.config.in_channels // PACK**2, *self._divided(height, width)


class Flux(PackedBackbone):
    """A `FluxPipeline` as a `Backbone`."""

    family = FLUX

    @staticmethod
    @torch.no_grad()
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with the pipeline's T5 and CLIP.

        Args:
            config: its `max_sequence_length` is T5's number of tokens L.

        Returns:
            T5's embeddings [1, L, D] and CLIP's pooled embeddings [1, P].
        """
        embeds, pooled, _ = pipeline.encode_prompt(
            prompt=text, prompt_2=text, device=device, max_sequence_length=config.max_sequence_length
        )
        return Conditioning.of({EMBEDS: cast(Tensor, embeds), "pooled_projections": cast(Tensor, pooled)})

    def example(self, count: int) -> Conditioning:
        """Return random embeddings of T5 and CLIP for `count` prompts."""
        pooled = torch.randn(count, self._pipeline.transformer.config.pooled_projection_dim, device=self._device)
        return Conditioning.of({**super().example(count).tensors, "pooled_projections": pooled})

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        count, _, height, width = latents.shape
        timesteps = self._pipeline.scheduler.config.num_train_timesteps
        guidance = None
        if self._pipeline.transformer.config.guidance_embeds:
            guidance = torch.full((count,), self._config.embedded_guidance, device=latents.device)
        predicted = self.transformer(
            hidden_states=pack(latents),
            timestep=(sigma * timesteps).to(latents.dtype) / 1000,  # the pipeline rounds both times
            guidance=guidance,
            img_ids=_positions(height // PACK, width // PACK, latents.device),
            txt_ids=torch.zeros(conditioning.lengths[0], 3, device=latents.device),
            return_dict=False,
            **conditioning.tensors,
        )[0]
        return unpack(predicted, height=height, width=width)


def dynamic_sigmas(settings: Any, *, steps: int, tokens: int) -> Float[Tensor, " points"]:
    """Return the schedule of a scheduler's config with `use_dynamic_shifting`, for an image of so many tokens."""
    return flux_sigmas(
        steps=steps,
        tokens=tokens,
        base_tokens=settings.base_image_seq_len,
        max_tokens=settings.max_image_seq_len,
        base_shift=settings.base_shift,
        max_shift=settings.max_shift,
        last=settings.get("shift_terminal"),
    )


def pack(latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B tokens channels"]:
    """Pack each 2 x 2 block of latents into one token of 4 C channels, row by row, as FLUX was trained."""
    count, channels, height, width = latents.shape
    # B, row, column, C, row in the block, column in the block
    cells = latents.view(count, channels, height // PACK, PACK, width // PACK, PACK).permute(0, 2, 4, 1, 3, 5)
    return cells.reshape(count, (height // PACK) * (width // PACK), channels * PACK**2)


def unpack(tokens: Float[Tensor, "B tokens channels"], *, height: int, width: int) -> Float[Tensor, "B C H W"]:
    """Undo `pack`.

    Args:
        tokens: packed latents [B, (H / 2) (W / 2), 4 C].
        height: H of the latents.
        width: W of the latents.
    """
    count, _, packed = tokens.shape
    channels = packed // PACK**2
    cells = tokens.view(count, height // PACK, width // PACK, channels, PACK, PACK).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(count, channels, height, width)


def _positions(rows: int, columns: int, device: torch.device) -> Float[Tensor, "tokens 3"]:
    """Return (0, row, column) of every token."""
    grid = torch.zeros(rows, columns, 3, device=device)
    grid[..., 1] = torch.arange(rows, device=device)[:, None]
    grid[..., 2] = torch.arange(columns, device=device)[None, :]
    return grid.view(rows * columns, 3)
