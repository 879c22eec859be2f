"""The FLUX.1 family: dev, which takes guidance as a model input, schnell, which does not, and Kontext, which edits.

Latents are [B, C, H, W] as everywhere; the transformer receives them packed, one token for each 2 x 2 block.
Classifier-free guidance (`model.guidance` above 1) with a negative prompt is the pipeline's "true CFG". The tokens of a
condition image follow the tokens of the latents; their positions differ in the first number, which is 1.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flow.maths.schedule import flux_sigmas, static_sigmas
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import FLUX, FLUX_KONTEXT
from flow.models.located import PACK, SIDE, Sizes
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig


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

    def _example_words(self, count: int) -> Conditioning:
        """Return random embeddings of T5 and CLIP for `count` prompts."""
        pooled = torch.randn(count, self._pipeline.transformer.config.pooled_projection_dim, device=self._device)
        return Conditioning.of({**super()._example_words(count).tensors, "pooled_projections": pooled})

    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        count, _, height, width = latents.shape
        timesteps = self._pipeline.scheduler.config.num_train_timesteps
        guidance = None
        if self._pipeline.transformer.config.guidance_embeds:
            guidance = torch.full((count,), self._config.embedded_guidance, device=latents.device)
        images = [latents, *conditioning.conditions]
        grids = [_positions(min(number, 1), each.shape, latents.device) for number, each in enumerate(images)]
        predicted = self.transformer(
            hidden_states=torch.cat([pack(each) for each in images], dim=1),
            timestep=(sigma * timesteps).to(latents.dtype) / 1000,  # the pipeline rounds both times
            guidance=guidance,
            img_ids=torch.cat(grids),
            txt_ids=torch.zeros(conditioning.lengths[0], 3, device=latents.device),
            return_dict=False,
            **conditioning.texts,
        )[0]
        return unpack(predicted[:, : len(grids[0])], height=height, width=width)


class FluxKontext(Flux):
    """A `FluxKontextPipeline` as a `Backbone`. A prompt has one condition image."""

    family = FLUX_KONTEXT

    @classmethod
    def condition_size(cls, width: int, height: int, *, side: int, sizes: Sizes) -> tuple[int, int]:
        """Return the size among the model's training sizes whose ratio is nearest to the image's, in whole tokens."""
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        ratio = sizes.whole(width) / sizes.whole(height)
        _, *trained = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        return trained[0] * side // SIDE, trained[1] * side // SIDE


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


def _positions(first: int, shape: Sequence[int], device: torch.device) -> Float[Tensor, "tokens 3"]:
    """Return (first, row, column) of every token; `shape` is [B, C, H, W] of the latents."""
    rows, columns = shape[2] // PACK, shape[3] // PACK
    grid = torch.full((rows, columns, 3), float(first), device=device)
    grid[..., 1] = torch.arange(rows, device=device)[:, None]
    grid[..., 2] = torch.arange(columns, device=device)[None, :]
    return grid.view(rows * columns, 3)
