"""Hollow models: backbones made from config files alone, with meaningless weights, for estimates and benchmarks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from flow.adapter.lora import inject
from flow.models.contract import Conditioning
from flow.models.embeddings import Embeddings
from flow.models.load import backbone_class
from flow.models.located import Located, locate
from flow.models.parts import text_arguments
from flow.models.pipeline import PipelineBackbone
from flow.models.reading import CLIP_TOKENS, clip_tokens, dtype_of, quiet_libraries, vae_dtype_of
from flow.quantized.transformer import quantized
from protocol.config.model import LoraConfig, ModelConfig
from protocol.errors import ModelError
from protocol.messages import ConditionImage, EncoderInput

LAYERS = ("num_layers", "num_single_layers", "n_layers")
"""Keys of a transformer's config that count its layers."""


def hollow_backbone(
    model: ModelConfig,
    *,
    device: str = "cpu",
    within: AbstractContextManager[Any] | None = None,
    most_layers: int | None = None,
) -> PipelineBackbone:
    """Make a model's backbone from its config files, with meaningless weights and random embeddings.

    Args:
        model: the model; for a hub id, only config files are downloaded.
        within: context that is entered while the weights are made; under FakeTensorMode they take no memory.
        most_layers: the limit of the transformer's layers of each kind; None makes all.

    Raises:
        ModelError: the model does not exist, or a part's config cannot be read.
    """
    located = locate(model)
    folder = located.folder
    model = model.model_copy(update={"compile": None, "vae_compile": None, "attention": "native"})
    parts: dict[str, Any] = {"clip_tokens": clip_tokens(folder)}
    with quiet_libraries():
        import diffusers

        for part in ("scheduler", "vae", "transformer"):
            kind = getattr(diffusers, _class_of(located, part))
            try:
                settings = kind.load_config(folder / part, local_files_only=True)
            except (OSError, ValueError) as error:
                raise ModelError(f"the {part} of {model.path} has no readable config: {error}") from error
            if most_layers and part == "transformer":
                held = {key: min(most_layers, settings[key]) for key in LAYERS if settings.get(key)}
                settings = {**settings, **held}
            with nullcontext() if part == "scheduler" or within is None else within:
                parts[part] = kind.from_config(settings)
        if tiny := located.tiny_decoder(is_whole=False):
            kind: Any = diffusers.AutoencoderTiny
            settings = kind.load_config(tiny, local_files_only=True)
            with within or nullcontext():
                parts["tiny_decoder"] = kind.from_config(settings)
    with within or nullcontext():
        return backbone_of_parts(backbone_class(located.family), model, parts, device=device)


def backbone_of_parts(
    kind: type[PipelineBackbone], model: ModelConfig, parts: dict[str, Any], *, device: str
) -> PipelineBackbone:
    """Make a backbone from existing parts; a prompt's embeddings are random.

    Args:
        parts: `transformer`, `vae`, `scheduler` and, where there is one, `tiny_decoder`; `clip_tokens` if not 77.
    """
    import diffusers

    pipeline = getattr(diffusers, kind.family.pipeline)(
        transformer=quantized(_converted(parts["transformer"], device, dtype_of(model)), model),
        vae=_converted(parts["vae"], device, vae_dtype_of(model)),
        scheduler=parts["scheduler"],
        **text_arguments(kind.family),
    )
    pipeline.tokenizer_max_length = parts.get("clip_tokens", CLIP_TOKENS)
    embeddings = _RandomEmbeddings()
    tiny = parts.get("tiny_decoder")
    tiny = tiny and _converted(tiny, device, vae_dtype_of(model))
    backbone = kind(pipeline, model, cast(Embeddings, embeddings), device=torch.device(device), tiny_decoder=tiny)
    embeddings.backbone = backbone
    return backbone


def attach_hollow_adapter(transformer: nn.Module, config: LoraConfig, *, within: AbstractContextManager[Any]) -> int:
    """Attach a float32 adapter of small random numbers to a transformer.

    Args:
        within: the context in which the transformer was made, such as FakeTensorMode.

    Raises:
        ModelError: a target names no module of the transformer.
    """
    inject(config, transformer, low_cpu_mem_usage=True)
    trained = 0
    for module in transformer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                with within:
                    module.register_parameter(name, nn.Parameter(0.01 * torch.randn(parameter.shape)))
                trained += parameter.numel()
    return trained


def hollow_encoders(model: ModelConfig) -> Iterable[nn.Module]:
    """Make a model's text encoders with meaningless weights, one after the other.

    Raises:
        ModelError: the model does not exist, or a config cannot be read.
    """
    located = locate(model)
    with quiet_libraries():
        import transformers

        for part in located.family.text_parts:
            if part not in located.parts or not part.startswith("text_encoder"):
                continue
            kind = getattr(transformers, _class_of(located, part))
            try:
                settings = kind.config_class.from_pretrained(located.folder / part, local_files_only=True)
            except (OSError, ValueError) as error:
                raise ModelError(f"the {part} of {model.path} has no readable config: {error}") from error
            yield _converted(kind(settings), "cpu", dtype_of(model))


def _converted(module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """Do what `module.to` does, but also for tensors without memory, which `module.to` refuses."""
    made: dict[int, nn.Parameter] = {}  # two modules may share a weight, as a language model's ends do
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().to(device, dtype), requires_grad=False)
            part.register_parameter(name, made[id(parameter)])
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, buffer.to(device, dtype if buffer.is_floating_point() else None))
    return module


def _class_of(located: Located, part: str) -> str:
    return located.index[part][1]


class _RandomEmbeddings:
    """Replaces `Embeddings` in a backbone without text encoders."""

    backbone: PipelineBackbone

    def __init__(self) -> None:
        self._made: dict[EncoderInput, Conditioning] = {}

    def of(self, text: str, conditions: tuple[ConditionImage, ...] = ()) -> Conditioning:
        asked = text, conditions
        if asked not in self._made:
            self._made[asked] = self.backbone.example(1)
        return self._made[asked]
