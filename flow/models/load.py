"""Load or check a pretrained model, or load only its text encoders; `model_index.json` decides the family."""

from collections.abc import Sequence
from pathlib import Path

import torch

from flow.adapter.lora import require_start
from flow.models.contract import Backbone
from flow.models.embeddings import Embeddings
from flow.models.families import Family
from flow.models.hub import is_on_hub, lora_path
from flow.models.located import Located, locate
from flow.models.parts import may_lack_weights, read_part, read_text_parts, read_tiny_decoder
from flow.models.pipeline import PipelineBackbone, require_known_schedule
from flow.models.reading import quiet_libraries
from flow.models.text import TextEncoders
from protocol.config.model import ModelConfig
from protocol.ground.import_path import find_class


def load_backbone(config: ModelConfig, *, device: str = "cpu") -> Backbone:
    """Load a model in diffusers' format from a folder or a hub id.

    Raises:
        ModelError: the model is missing, broken or of an unknown family, or it cannot generate images of this size.
    """
    return load_located(locate_for_images(config), device=device)


def locate_for_images(config: ModelConfig) -> Located:
    """Find a model; with an embedding cache, its text encoders are downloaded only when a prompt is missing there."""
    return locate(config, is_whole=True, has_encoders=config.embedding_cache is None)


def load_located(located: Located, *, device: str) -> Backbone:
    """Load a model that was found whole, like `load_backbone`."""
    kind = backbone_class(located.family)
    return kind.of(kind.read(located, [torch.device(device)]))


class FrozenModel:
    """A model in memory, of which several backbones are made: each takes an adapter of its own, all share the weights.

    frozen = FrozenModel(config.model, ["cuda"])
    rollout, learner = frozen.backbone(), frozen.backbone()

    Args:
        devices: more than one share the blocks of the transformer, in turn.

    Raises:
        ModelError: see `load_backbone`.
    """

    def __init__(self, config: ModelConfig, devices: Sequence[str]) -> None:
        self.located = locate_for_images(config)
        self._kind = backbone_class(self.located.family)
        self._parts = self._kind.read(self.located, [torch.device(device) for device in devices])

    def backbone(self) -> Backbone:
        return self._kind.of(self._parts.twin())


def require_loadable(located: Located) -> None:
    """Check everything that `load_backbone` and `open_embeddings` check, and the LoRA to start from, by headers alone.

    Of a hub id, what is not downloaded yet is not checked; loading it will.

    Raises:
        ModelError: the model or the LoRA cannot be loaded.
    """
    path, lora = located.model.path, located.lora
    with quiet_libraries():
        require_known_schedule(located.require_scheduler(), backbone_class(located.family).schedule_options)
        transformer, _ = (
            None if may_lack_weights(path, located.folder / part) else read_part(located, part, is_outline=True)
            for part in ("transformer", "vae")
        )
        read_text_parts(located, is_outline=True)
        read_tiny_decoder(located, is_outline=True)
    if lora.start:
        start = lora_path(lora.start, lora.revision, is_whole=False)
        is_here = not is_on_hub(lora.start) or any(Path(start).glob("*.safetensors"))
        if transformer is not None and is_here:
            require_start(start, lora, transformer)


def backbone_class(family: Family) -> type[PipelineBackbone]:
    """Import and return a family's backbone class."""
    return find_class(family.backbone)


def open_embeddings(config: ModelConfig, *, device: str) -> Embeddings:
    """Return a model's embeddings without loading its transformer and VAE.

    Raises:
        ModelError: the model does not exist.
    """
    located = locate_for_images(config)
    encode = backbone_class(located.family).encode_whole
    return Embeddings(TextEncoders(located, encode=encode, device=torch.device(device)))
