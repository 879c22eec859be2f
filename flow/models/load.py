"""Loading a pretrained model, or its text side alone, by the family that its folder belongs to."""

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
    """Load a model in diffusers' format: a folder, or a hub id.

    Raises:
        ModelError: the model is missing, broken, of an unknown family, or cannot draw the size that is asked for.
    """
    index, folder = find_model(config)
    return backbone_class(index.family).load(config, folder, device=torch.device(device))


def backbone_class(family: Family) -> type[PipelineBackbone]:
    """The class behind a family's entry."""
    return find_class(family.backbone)


def open_embeddings(config: ModelConfig, *, device: str) -> Embeddings:
    """The embeddings of a model without its transformer and VAE.

    Raises:
        ModelError: no such model.
    """
    index, folder = find_model(config)
    encode = backbone_class(index.family).encode_prompt
    encoders = TextEncoders(index.family, folder, config, encode=encode, device=torch.device(device))
    return Embeddings(encoders, config)
