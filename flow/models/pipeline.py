"""What the families share: a diffusers pipeline's transformer, VAE and scheduler behind the `Backbone` contract.

A family adds its schedule, its forward and its way to encode a prompt; see `flow.models.sd3` and `flow.models.flux`.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from flow.models.contract import Conditioning
from flow.models.embeddings import Embeddings
from flow.models.families import Family
from flow.models.text import UNREADABLE, TextEncoders, unreadable
from flow.runtime.precision import autocast, dtype_of
from flow.runtime.quiet import quiet_libraries
from protocol.config.model import ModelConfig
from protocol.errors import ModelError

UNKNOWN_SCHEDULES = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "shift_terminal",
    "stochastic_sampling",
)
"""Options of the scheduler that change its sigmas in ways `flow.maths.schedule` does not follow."""


class PipelineBackbone(ABC):
    """A pipeline's frozen parts; float32 unless `model.dtype` says otherwise, the VAE always float32.

    Args:
        pipeline: with transformer, vae and scheduler on `device`; its text parts are not used.
        embeddings: where `encode` asks.
    """

    family: ClassVar[Family]
    has_dynamic_shift: ClassVar[bool] = False
    """Whether the family's schedule depends on the size of the image."""

    def __init__(self, pipeline: Any, config: ModelConfig, embeddings: Embeddings, *, device: torch.device) -> None:
        self._pipeline = pipeline
        self._config = config
        self._embeddings = embeddings
        self._device = device
        self._dtype = dtype_of(config)
        self._require_known_schedule()
        self.vae = pipeline.vae.requires_grad_(requires_grad=False).eval()
        self.transformer = pipeline.transformer.requires_grad_(requires_grad=False).eval()
        self.latent_shape = self._latent_shape(config.height, config.width)
        if config.vae_tiling:
            self.vae.enable_tiling()
        if config.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if config.compile:
            self._compile(config.compile)

    @classmethod
    def load(cls, config: ModelConfig, folder: Path, *, device: torch.device) -> Self:
        """Read the pipeline; with an embedding cache its text encoders wait until a prompt needs them.

        Raises:
            ModelError: a part cannot be read, or the size that is asked for does not fit.
        """
        absent = dict.fromkeys(cls.family.text_parts)
        dtypes = {"default": torch.float32, "transformer": dtype_of(config), "vae": torch.float32}
        with quiet_libraries():
            import diffusers

            try:
                pipeline = getattr(diffusers, cls.family.pipeline).from_pretrained(
                    folder, local_files_only=True, dtype=dtypes, **absent
                )
            except UNREADABLE as error:
                raise unreadable(folder, cls.family, error) from error
            pipeline.to(device)
        encoders = TextEncoders(cls.family, folder, config, encode=cls.encode_prompt, device=device)
        if config.embedding_cache is None:
            encoders.load()
        return cls(pipeline, config, Embeddings(encoders, config), device=device)

    @staticmethod
    @abstractmethod
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """One prompt through the pipeline's own `encode_prompt`, each tensor [1, ...]."""

    @abstractmethod
    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """The family's own schedule."""

    @abstractmethod
    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """The transformer's prediction, in whatever precision it comes."""

    @abstractmethod
    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        """C, H, W of the latents of an image of this size in pixels; ModelError when the model cannot draw it."""

    @abstractmethod
    def example(self, count: int) -> Conditioning:
        """Zeros in the shape of `count` prompts' embeddings: for measuring, without a text encoder."""

    def encode(self, text: str) -> Conditioning:
        """Prompt embeddings from the pipeline's own `encode_prompt`, kept in memory and, when configured, on disk."""
        return self._embeddings.of(text)

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """The transformer's prediction under the configured precision, float32."""
        with autocast(self._device, self._dtype):
            return self._predict(latents, sigma, conditioning).float()

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C H W"]) -> UInt8[np.ndarray, "B height width 3"]:
        """VAE decoding, `decode_batch` at once, and the pipeline's own rounding to 8 bits."""
        chunks = latents.split(self._config.decode_batch or len(latents))
        return np.concatenate([self._images(chunk) for chunk in chunks])

    def _images(self, latents: Float[Tensor, "B C H W"]) -> UInt8[np.ndarray, "B height width 3"]:
        scaled = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        images = self.vae.decode(scaled, return_dict=False)[0]
        unit = cast(np.ndarray, self._pipeline.image_processor.postprocess(images, output_type="np"))
        return (unit * 255).round().astype(np.uint8)

    def _compile(self, backend: str) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ModelError(f"model.compile must be one of torch's backends {sorted(known)}, got {backend!r}")
        self.transformer.compile(backend=backend)

    def _require_known_schedule(self) -> None:
        settings = self._pipeline.scheduler.config
        unknown = [option for option in UNKNOWN_SCHEDULES if settings.get(option)]
        if settings.use_dynamic_shifting and settings.time_shift_type != "exponential":
            unknown.append("time_shift_type")
        if settings.use_dynamic_shifting and not self.has_dynamic_shift:
            unknown.append("use_dynamic_shifting")
        if unknown:
            raise ModelError(f"the model's scheduler must leave {', '.join(unknown)} off: its sigmas would be others")

    def _divided(self, height: int, width: int, *, by: int) -> tuple[int, int]:
        """Latent height and width of an image: both sides must be multiples of `by` pixels."""
        if height % by or width % by:
            raise ModelError(f"model.height and model.width must be multiples of {by}, got {height} and {width}")
        scale = self._pipeline.vae_scale_factor
        return height // scale, width // scale
