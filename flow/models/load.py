"""Load a pretrained model, or only its text encoders; the folder's `model_index.json` decides the family."""

import torch

from flow.models.contract import Backbone
from flow.models.embeddings import Embeddings
from flow.models.families import Family
from flow.models.folder import find_model
from flow.models.pipeline import PipelineBackbone
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
