"""Load or check a pretrained model, or load only its text encoders; `model_index.json` decides the family."""

from pathlib import Path

import torch

from flow.adapter.lora import require_start
from flow.models.contract import Backbone
from flow.models.embeddings import Embeddings
from flow.models.families import Family
from flow.models.folder import adapter_config, find_configs, find_model
from flow.models.hub import adapter_folder, is_on_hub
from flow.models.parts import may_lack_weights, read_part, read_text_parts, read_tiny_decoder, scheduler_settings
from flow.models.pipeline import PipelineBackbone, require_known_schedule
from flow.models.reading import quiet_libraries
from flow.models.text import TextEncoders
from protocol.config.model import ModelConfig
from protocol.import_path import find_class


def load_backbone(config: ModelConfig, *, device: str = "cpu") -> Backbone:
    """Load a model in diffusers' format from a folder or a hub id.

    Raises:
        ModelError: the model is missing, broken or of an unknown family, or it cannot generate images of this size.
    """
    index, folder = find_model(config)
    return backbone_class(index.family).load(config, folder, device=torch.device(device))


def require_loadable(model: ModelConfig) -> None:
    """Check everything that `load_backbone` and `open_embeddings` check, and the LoRA to start from, by headers alone.

    Of a hub id, what is not downloaded yet is not checked; loading it will.

    Raises:
        ModelError: the model or the LoRA cannot be loaded.
    """
    index, folder = find_configs(model)
    with quiet_libraries():
        require_known_schedule(scheduler_settings(folder), backbone_class(index.family).schedule_options)
        transformer, _ = (
            None if may_lack_weights(model.path, folder / part) else read_part(folder, part, is_outline=True)
            for part in ("transformer", "vae")
        )
        read_text_parts(index.family, folder, path=model.path, is_outline=True)
        read_tiny_decoder(model, folder, is_outline=True)
    if model.lora.start:
        start = adapter_folder(model.lora.start, model.lora.revision, is_whole=False)
        is_here = not is_on_hub(model.lora.start) or any(Path(start).glob("*.safetensors"))
        if transformer is not None and is_here:
            require_start(start, adapter_config(model), transformer)


def backbone_class(family: Family) -> type[PipelineBackbone]:
    """Import and return a family's backbone class."""
    return find_class(family.backbone)


def open_embeddings(config: ModelConfig, *, device: str) -> Embeddings:
    """Return a model's embeddings without loading its transformer and VAE.

    Raises:
        ModelError: the model does not exist.
    """
    index, folder = find_model(config)
    encode = backbone_class(index.family).encode_prompt
    encoders = TextEncoders(index.family, folder, config, encode=encode, device=torch.device(device))
    return Embeddings(encoders, config)
