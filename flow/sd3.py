"""The Stable Diffusion 3 family through diffusers: loading, embeddings, velocity, decoding."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError
from torch import Tensor

from flow.backbone import Conditioning
from flow.quiet import quiet_libraries
from flow.schedule import sd3_sigmas
from protocol.errors import ModelError

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

KEPT_PROMPTS = 256
"""Embeddings that are kept, least recently used dropped first: one of SD3.5 takes 5 MB, a prompt file has 50,000."""


class StableDiffusion3:
    """A `StableDiffusion3Pipeline` folder behind the `Backbone` contract; float32, frozen, in evaluation mode."""

    def __init__(self, folder: Path, *, max_sequence_length: int, device: str) -> None:
        self._pipeline = _load(folder, device)
        self._max_sequence_length = max_sequence_length
        self._embeddings: OrderedDict[str, Conditioning] = OrderedDict()
        self.transformer = self._pipeline.transformer.requires_grad_(requires_grad=False).eval()
        size = self.transformer.config.sample_size
        self.latent_shape = (self.transformer.config.in_channels, size, size)

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """The doubly shifted schedule with the folder's own shift."""
        scheduler = self._pipeline.scheduler.config
        return sd3_sigmas(steps=steps, shift=scheduler.shift, train_timesteps=scheduler.num_train_timesteps)

    @torch.no_grad()
    def encode(self, text: str) -> Conditioning:
        """Prompt embeddings [1, L, D] and pooled projections [1, P] from the pipeline's own `encode_prompt`."""
        if text not in self._embeddings:
            embeds, _, pooled, _ = self._pipeline.encode_prompt(
                prompt=text,
                prompt_2=text,
                prompt_3=text,
                do_classifier_free_guidance=False,
                max_sequence_length=self._max_sequence_length,
            )
            self._embeddings[text] = {
                "encoder_hidden_states": cast(Tensor, embeds),
                "pooled_projections": cast(Tensor, pooled),
            }
            if len(self._embeddings) > KEPT_PROMPTS:
                self._embeddings.popitem(last=False)
        self._embeddings.move_to_end(text)
        return self._embeddings[text]

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """The transformer's prediction at timestep 1000 sigma."""
        timestep = sigma * self._pipeline.scheduler.config.num_train_timesteps
        return self.transformer(hidden_states=latents, timestep=timestep, return_dict=False, **conditioning)[0].float()

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C H W"]) -> UInt8[np.ndarray, "B height width 3"]:
        """VAE decoding and the pipeline's own rounding to 8 bits."""
        vae = self._pipeline.vae
        pictures = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        unit = cast(np.ndarray, self._pipeline.image_processor.postprocess(pictures, output_type="np"))
        return (unit * 255).round().astype(np.uint8)


def _load(folder: Path, device: str) -> "StableDiffusion3Pipeline":
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    absent = {name: None for name in ("text_encoder_3", "tokenizer_3") if (index.get(name) or [None, None])[1] is None}
    with quiet_libraries():
        from diffusers import StableDiffusion3Pipeline

        try:
            pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, **absent)
        except (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"model folder {folder} cannot be loaded as StableDiffusion3Pipeline: {reason}") from error
        return pipeline.to(device, torch.float32)
