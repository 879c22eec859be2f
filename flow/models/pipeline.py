"""The shared base of all families: a diffusers pipeline's transformer, VAE and scheduler as a `Backbone`.

A family adds its schedule, its forward and its prompt encoding; see `flow.models.backbones`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from flow.attention import choose_attention
from flow.fused import fuse, join_attention, require_kernels
from flow.models.contract import EMBEDS, Conditioning
from flow.models.embeddings import Embeddings
from flow.models.families import Family
from flow.models.host_copy import frozen_tensors, host_copy
from flow.models.located import Located, Sizes, sizes_of
from flow.models.parts import pipeline_of, read_part, read_tiny_decoder
from flow.models.reading import clip_tokens, dtype_of, quiet_libraries, vae_dtype_of
from flow.models.text import TextEncoders
from flow.pieces import even_pieces
from flow.quantized.transformer import quantization_of
from flow.spread import spread
from protocol.config.model import ModelConfig
from protocol.errors import ModelError, NonFiniteError
from protocol.messages import ConditionImage

SHIFTS = ("use_dynamic_shifting", "shift_terminal")
"""Scheduler options that some families' schedules follow."""
UNKNOWN_SCHEDULES = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
    "sample_sigmas",
)
"""Options of a scheduler or a pipeline that change the sigmas in ways that `flow.maths.schedule` does not implement."""


@dataclass(frozen=True)
class FrozenParts:
    """What a backbone is made of, on its devices."""

    located: Located
    device: torch.device
    pipeline: Any
    """With transformer, VAE and scheduler."""
    tiny_decoder: Any
    encoders: TextEncoders

    def twin(self) -> "FrozenParts":
        """Return the same parts with a transformer of its own for another adapter; both share all tensors.

        So one may compute in torch's inference mode and the other with gradients: what modules keep is their own.
        """
        pipeline, transformer = copy(self.pipeline), self.pipeline.transformer
        shared = {id(tensor): tensor for tensor in (*transformer.parameters(), *transformer.buffers())}
        pipeline.transformer = deepcopy(transformer, shared)
        return replace(self, pipeline=pipeline)


class PipelineBackbone(ABC):
    """A pipeline's frozen parts. The transformer has the dtype `model.dtype`, the VAE `model.vae_dtype`.

    Five methods of a family answer for its pipeline: `encode_prompt`, `sigmas`, `_predict`, `_latent_shape` and
    `_example_words`. It overrides `guide` if guidance is not v_u + w (v_c - v_u), `pixels` if decoding is not VAE,
    scaling factor and shift, and `condition_size` if it takes condition images.

    Args:
        pipeline: a pipeline with transformer, vae and scheduler on `device`; its text encoders are not used.
        tiny_decoder: an `AutoencoderTiny` on `device` for the images of completed points; without one the VAE decodes
            all images.
    """

    family: ClassVar[Family]
    schedule_options: ClassVar[frozenset[str]] = frozenset()
    """Scheduler options that the family's schedule follows, of `SHIFTS`."""
    decoded_again = 0
    example_conditions: int
    """Condition images of a prompt of `example`."""

    def __init__(
        self,
        pipeline: Any,
        config: ModelConfig,
        embeddings: Embeddings,
        *,
        device: torch.device,
        tiny_decoder: Any = None,
    ) -> None:
        self._pipeline = pipeline
        self._config = config
        self._embeddings = embeddings
        self._device = device
        self._dtype = dtype_of(config)
        self._vae_dtype = vae_dtype_of(config)
        self._is_awake = True
        self._frozen: list[Tensor] = []
        self._resting: list[Tensor] = []
        """The frozen tensors in host memory, once this model has rested."""
        named = {"sample_sigmas": pipeline.config.get("sample_sigmas")}
        require_known_schedule({**pipeline.scheduler.config, **named}, self.schedule_options)
        self.vae = pipeline.vae.requires_grad_(requires_grad=False).eval()
        self.tiny_decoder = tiny_decoder and tiny_decoder.requires_grad_(requires_grad=False).eval()
        self.transformer = pipeline.transformer.requires_grad_(requires_grad=False).eval()
        self._sizes = sizes_of(pipeline.transformer.config, pipeline.vae.config)
        self.latent_shape = self._latent_shape(config.height, config.width)
        self.example_conditions = self.family.least_conditions
        for vae in filter(None, (self.vae, self.tiny_decoder)):
            if device.type == "cpu" or config.vae_compile:
                _order_channels_last(vae)
            if config.vae_compile:
                self._compile_decoder(vae.decoder, config.vae_compile)
        if self._dtype != torch.float32:
            fuse(self.transformer, norms=config.norms if device.type == "cuda" else "torch")
        elif config.attention != "native":
            join_attention(self.transformer)
        with quiet_libraries():  # always: without a choice an environment variable decides
            choose_attention(self.transformer, config.attention, device=device.type)
        if config.vae_tiling:
            self.vae.enable_tiling()
        if config.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if config.compile:
            self._compile(config.compile)

    @classmethod
    def read(cls, located: Located, devices: Sequence[torch.device]) -> FrozenParts:
        """Read the parts. With an embedding cache the text encoders are loaded later, when a prompt needs them.

        Args:
            devices: all parts are on the first one; several share the blocks of the transformer, in turn.

        Raises:
            ModelError: a part cannot be read, or a kernel that the config asks for is not there.
        """
        config, device = located.model, devices[0]
        if device.type == "cuda":
            require_kernels(config, device.type)
        with quiet_libraries():
            transformer = read_part(
                located, "transformer", dtype=dtype_of(config), quantization_config=quantization_of(config)
            )
            vae = read_part(located, "vae", dtype=vae_dtype_of(config))
            tiny = read_tiny_decoder(located, dtype=vae_dtype_of(config))
            pipeline = pipeline_of(located, transformer=transformer, vae=vae)
            pipeline.tokenizer_max_length = clip_tokens(located.folder)
            spread(transformer, devices, cls.family.block_lists)
            vae.to(device)
            if tiny:
                tiny.to(device)
        encoders = TextEncoders(located, encode=cls.encode_whole, device=device)
        if config.embedding_cache is None:
            encoders.load()
        return FrozenParts(located, device, pipeline, tiny, encoders)

    @classmethod
    def of(cls, parts: FrozenParts) -> Self:
        """Make a backbone of parts that no other backbone has.

        Raises:
            ModelError: the model cannot generate images of the configured size.
        """
        return cls(
            parts.pipeline,
            parts.located.model,
            Embeddings(parts.encoders),
            device=parts.device,
            tiny_decoder=parts.tiny_decoder,
        )

    @staticmethod
    @abstractmethod
    def encode_prompt(pipeline: Any, text: str, config: ModelConfig, device: torch.device) -> Conditioning:
        """Encode one prompt with the pipeline's own `encode_prompt`.

        Returns:
            The prompt's embeddings, without padding that the model does not attend to.
        """

    @classmethod
    @torch.no_grad()
    def encode_whole(
        cls, pipeline: Any, text: str, images: Sequence[np.ndarray], config: ModelConfig, device: torch.device
    ) -> Conditioning:
        """Encode one prompt, and the latents of its condition images, uint8 [H, W, 3] each, as the pipeline does."""
        words = cls.encode_prompt(pipeline, text, config, device)
        return words.given([cls.encode_condition(pipeline, Image.fromarray(each), config) for each in images])

    @classmethod
    def encode_condition(cls, pipeline: Any, image: Image.Image, config: ModelConfig) -> Float[Tensor, "1 C h w"]:
        """Resize a condition image by the family's rule and encode it."""
        sizes = sizes_of({}, pipeline.vae.config)
        size = cls.condition_size(image.width, image.height, side=config.condition_side, sizes=sizes)
        pixels = cls.prepared(pipeline, image, size, sizes)
        return cls.encode_pixels(pipeline, pixels.to(pipeline.vae.device, pipeline.vae.dtype))

    @classmethod
    def prepared(
        cls, pipeline: Any, image: Image.Image, size: tuple[int, int], sizes: Sizes
    ) -> Float[Tensor, "1 3 H W"]:
        """Resize an image to whole tokens; its values are from -1 to 1."""
        width, height = map(sizes.whole, size)
        return pipeline.image_processor.preprocess(image, height, width)

    @classmethod
    def encode_pixels(cls, pipeline: Any, pixels: Float[Tensor, "1 3 H W"]) -> Float[Tensor, "1 C h w"]:
        """Encode an image from -1 to 1 with the pipeline's VAE, without noise."""
        return pipeline._encode_vae_image(pixels, None)

    @classmethod
    def condition_size(cls, width: int, height: int, *, side: int, sizes: Sizes) -> tuple[int, int]:
        """Return width and height in pixels to which a condition image is resized, before they are cut to whole tokens.

        Args:
            width: of the image.
            height: of the image.
            side: of the square whose area it shall have.
            sizes: of the model.
        """
        raise NotImplementedError(f"{cls.family.pipeline} takes no condition images")

    @abstractmethod
    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        """Return the family's own schedule for T = `steps` denoising steps, [T+1], the pipeline's bit for bit."""

    @abstractmethod
    def _predict(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """Return the transformer's prediction in the transformer's own precision; packing stays inside.

        The timestep is rounded as in the pipeline: FLUX and Qwen-Image round t to the dtype and again after the
        division by 1000, SD3 and Z-Image pass float32.
        """

    @abstractmethod
    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        """Return C, H, W of the latents for an image size in pixels.

        Raises:
            ModelError: the model cannot generate images of this size.
        """

    def example(self, count: int) -> Conditioning:
        """Return random embeddings of `count` prompts with condition images, for measurements without encoders."""
        words, side = self._example_words(count), self._config.condition_side
        if not self.example_conditions:
            return words
        width, height = map(self._sizes.whole, self.condition_size(side, side, side=side, sizes=self._sizes))
        shape = count, *self._latent_shape(height, width)
        return words.given([torch.randn(shape, device=self._device) for _ in range(self.example_conditions)])

    def _example_words(self, count: int) -> Conditioning:
        """Return random embeddings of `count` prompts."""
        width, length = self._pipeline.transformer.config.joint_attention_dim, self._config.max_sequence_length
        return Conditioning.of({EMBEDS: torch.randn(count, length, width, device=self._device)})

    def sized(self, height: int, width: int) -> Self:
        other = copy(self)
        other.latent_shape = self._latent_shape(height, width)
        return other

    def encode(self, text: str, conditions: tuple[ConditionImage, ...] = ()) -> Conditioning:
        """Return a prompt's embeddings; they are kept in memory and, if configured, in the cache folder."""
        return self._embeddings.of(text, conditions)

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """Predict the velocity with the configured precision, as the pipeline does."""
        return self._predict(latents.to(self._dtype), sigma, conditioning.to(self._dtype)).float()

    def guide(
        self, without: Float[Tensor, "B C H W"], toward: Float[Tensor, "B C H W"], weight: float
    ) -> Float[Tensor, "B C H W"]:
        """Combine the velocities of the two branches of guidance: v_u + w (v_c - v_u)."""
        return without + weight * (toward - without)

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C H W"], *, points: int = 0) -> UInt8[np.ndarray, "B height width 3"]:
        """Decode clean latents, at most `decode_batch` at a time, and round to 8 bits as the pipeline does.

        An image whose decoding overflows in half precision is decoded again, alone and in float32.
        """
        tiny = points if self.tiny_decoder else 0
        parts = ((True, latents[:tiny]), (False, latents[tiny:]))
        most = self._config.decode_batch
        chunks = ((which, rows[piece]) for which, rows in parts for piece in even_pieces(len(rows), most))
        images, start = np.empty((0,), np.uint8), 0
        for is_tiny, chunk in chunks:
            made = self._images(chunk, is_tiny=is_tiny)
            if not start:
                images = np.empty((len(latents), *made.shape[1:]), np.uint8)
            images[start : start + len(made)] = made
            start += len(made)
        return images

    def pixels(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 3 height width"]:
        """Return the VAE's output for clean latents, in its own dtype and range."""
        scaled = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return self.vae.decode(scaled.to(self._vae_dtype), return_dict=False)[0]

    def tiny_pixels(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 3 height width"]:
        """Return the tiny decoder's output for clean latents, in its own dtype and range."""
        tiny = self.tiny_decoder
        scaled = latents / tiny.config.scaling_factor + tiny.config.shift_factor
        return tiny.decode(scaled.to(self._vae_dtype), return_dict=False)[0]

    def rest(self) -> None:
        """Keep transformer and VAE in host memory, and free their GPU memory for other processes.

        The frozen weights are dropped for the node's one copy of them; the adapter moves. On a CPU all stays where it
        is: addresses can decide the rounding there.
        """
        if self._device == torch.device("cpu"):
            return
        if not self._resting:
            self._frozen = frozen_tensors(self._modules)
            self._resting = host_copy(self._frozen)
        self._is_awake = False
        for tensor, held in zip(self._frozen, self._resting, strict=True):
            tensor.data = held
        self._move_adapter(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self._is_awake:
            return
        for tensor, held in zip(self._frozen, self._resting, strict=True):
            tensor.data = held.to(self._device)
        self._move_adapter(self._device)
        self._is_awake = True

    def _move_adapter(self, device: torch.device) -> None:
        for parameter in self.transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(device)

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [module for module in (self.transformer, self.vae, self.tiny_decoder) if module]

    def _images(self, latents: Float[Tensor, "B C H W"], *, is_tiny: bool) -> UInt8[np.ndarray, "B height width 3"]:
        decode, filled = self.tiny_pixels if is_tiny else self.pixels, latents
        if self._config.vae_compile and self._config.decode_batch:  # one shape, so one graph
            filled = torch.cat([latents, latents[-1:].repeat(self._config.decode_batch - len(latents), 1, 1, 1)])
        pixels = decode(filled)[: len(latents)]
        unit = cast(Tensor, self._pipeline.image_processor.postprocess(pixels, output_type="pt"))
        rounded = (unit.float() * 255).round().to(torch.uint8)  # 8 bits leave the device, not 32
        images = rounded.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        overflowed = (~torch.isfinite(pixels).flatten(1).all(1)).nonzero().flatten().tolist()
        if overflowed:
            if not torch.isfinite(latents[overflowed]).all():
                raise NonFiniteError("latents that are decoded must be finite, got NaN or infinity")
            if pixels.dtype == torch.float32:
                raise NonFiniteError("decoded images must be finite, got NaN or infinity of a VAE in float32")
            exact = self._decoding_in_float32()
            for row in overflowed:
                images[row] = exact._images(latents[row : row + 1], is_tiny=is_tiny)[0]
            self.decoded_again += len(overflowed)
        return images

    def _decoding_in_float32(self) -> Self:
        """Return this model with float32 copies of its decoders; they are freed with it."""
        other = copy(self)
        other.vae, other.tiny_decoder = (part and deepcopy(part).float() for part in (self.vae, self.tiny_decoder))
        other._vae_dtype = torch.float32
        other._config = self._config.model_copy(update={"vae_compile": None})
        return other

    def _compile(self, backend: str) -> None:
        """Let torch compile every block of the transformer."""
        from flow.compiled import CompiledBlocks

        CompiledBlocks(self.transformer, backend, device=self._device.type)

    def _compile_decoder(self, decoder: torch.nn.Module, backend: str) -> None:
        from flow.compiled import compile_decoder

        compile_decoder(decoder, backend, device=self._device.type)

    def _divided(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Return height and width of an image in the VAE's latents; by default for the pipeline's own image size."""
        if height is None or width is None:
            side: int = self._pipeline.default_sample_size * self._sizes.scale
            height = width = side
        self._sizes.require(height, width)
        return height // self._sizes.scale, width // self._sizes.scale


def require_known_schedule(settings: Mapping[str, Any], followed: Collection[str]) -> None:
    """Check that a model's scheduler has the sigmas that its family's schedule computes.

    Args:
        followed: options of `SHIFTS` that the family's schedule follows.

    Raises:
        ModelError: an option would give other sigmas.
    """
    unknown = [option for option in UNKNOWN_SCHEDULES if settings.get(option)]
    if settings.get("use_dynamic_shifting") and settings.get("time_shift_type", "exponential") != "exponential":
        unknown.append("time_shift_type")
    unknown += [option for option in SHIFTS if settings.get(option) and option not in followed]
    if unknown:
        raise ModelError(
            f"the model's scheduler must leave {', '.join(unknown)} off: our schedule would differ from its sigmas"
        )


def _order_channels_last(vae: torch.nn.Module) -> None:
    """Give the weights of an image VAE the layout in which oneDNN computes convolutions.

    On a GPU it pays only if the decoder is compiled: torch's group norms there read another layout, and each of them
    would copy its input.
    `vae.to(memory_format=...)` does not work on fake tensors.
    """
    weights = list(vae.parameters())
    if all(weight.ndim < 5 for weight in weights):
        for weight in weights:
            if weight.ndim == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
