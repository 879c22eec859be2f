"""The text side of a pipeline: loaded when a prompt first needs it, and given back when told."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError

from flow.models.contract import Conditioning
from flow.models.families import Family
from flow.runtime.precision import dtype_of
from flow.runtime.quiet import quiet_libraries
from protocol.config.model import ModelConfig
from protocol.errors import ModelError, one_line

UNREADABLE = (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, SafetensorError)
"""What diffusers and transformers raise when a folder is broken."""
Encode = Callable[[Any, str, ModelConfig, torch.device], Conditioning]
"""A family's way to ask its pipeline for one prompt's embeddings."""


class TextEncoders:
    """Tokenizers and text encoders of a model folder, without its transformer and VAE."""

    def __init__(
        self, family: Family, folder: Path, config: ModelConfig, *, encode: Encode, device: torch.device
    ) -> None:
        self.family = family
        self.folder = folder
        self.device = device
        self._config = config
        self._encode = encode
        self._pipeline: Any = None

    @property
    def is_loaded(self) -> bool:
        """Whether the encoders take memory now."""
        return self._pipeline is not None

    def encode(self, text: str) -> Conditioning:
        """One prompt's embeddings, each [1, ...], on the encoders' device.

        Raises:
            ModelError: the encoders cannot be read.
        """
        self.load()
        return self._encode(self._pipeline, text, self._config, self.device)

    def load(self) -> None:
        """Read the encoders, unless they are there.

        Raises:
            ModelError: they cannot be read.
        """
        if self._pipeline is None:
            self._pipeline = self._load()

    def free(self) -> None:
        """Give the encoders' memory back."""
        self._pipeline = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Any:
        index = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        lacking = {part: None for part in self.family.text_parts if (index.get(part) or [None, None])[1] is None}
        with quiet_libraries():
            import diffusers

            try:
                pipeline = getattr(diffusers, self.family.pipeline).from_pretrained(
                    self.folder,
                    local_files_only=True,
                    dtype=dtype_of(self._config),
                    transformer=None,
                    vae=None,
                    **lacking,
                )
            except UNREADABLE as error:
                raise unreadable(self.folder, self.family, error) from error
            for part in self.family.text_parts:
                module = getattr(pipeline, part, None)
                if isinstance(module, torch.nn.Module):
                    module.requires_grad_(requires_grad=False).eval().to(self.device)
        # The pipeline reads the width of an absent encoder's zeros from its transformer's config, nothing else.
        settings = json.loads((self.folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**settings))
        return pipeline


def unreadable(folder: Path, family: Family, error: Exception) -> ModelError:
    """The one line of a model folder that the libraries cannot load."""
    reason = one_line(error)
    return ModelError(f"model folder {folder} cannot be loaded as {family.pipeline}: {reason}")
