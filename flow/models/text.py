"""The text encoders of a pipeline: loaded when a prompt first needs them, and freed on request."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flow.models.contract import Conditioning
from flow.models.families import Family
from flow.models.folder import find_configs
from flow.models.parts import pipeline_of, read_text_parts, read_tokenizer, whole_settings
from flow.models.reading import dtype_of, quiet_libraries
from protocol.config.model import ModelConfig

Encode = Callable[[Any, str, ModelConfig, torch.device], Conditioning]
"""A family's `encode_prompt(pipeline, text, config, device)`: one prompt's embeddings."""


class TextEncoders:
    """Tokenizers and text encoders of a model folder, without its transformer and VAE.

    Args:
        family: the model's family.
        folder: the model's folder in diffusers' format.
        config: the model's config.
        encode: the family's `encode_prompt`.
        device: torch device of the encoders.
    """

    def __init__(
        self, family: Family, folder: Path, config: ModelConfig, *, encode: Encode, device: torch.device
    ) -> None:
        self.family = family
        self.folder = folder
        self.device = device
        self._config = config
        self._encode = encode
        self._pipeline: Any = None

    def encode(self, text: str) -> Conditioning:
        """Return one prompt's embeddings on the encoders' device.

        Raises:
            ModelError: the encoders cannot be read.
        """
        self.load()
        return self._encode(self._pipeline, text, self._config, self.device)

    def load(self) -> None:
        """Load the encoders unless they are in memory.

        Raises:
            ModelError: they cannot be read.
        """
        if self._pipeline is None:
            self._pipeline = self._load()

    def free(self) -> None:
        """Free the encoders' memory."""
        self._pipeline = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Any:
        with quiet_libraries():
            parts = read_text_parts(self.family, self.folder, dtype=dtype_of(self._config))
            for module in parts.values():
                if isinstance(module, torch.nn.Module):
                    module.requires_grad_(requires_grad=False).eval().to(self.device)
            pipeline = pipeline_of(self.family, self.folder, transformer=None, vae=None, **parts)
            # The pipeline reads only the transformer's config: the width of the zeros that replace an absent encoder.
            settings = whole_settings(self.folder, "transformer")
        pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**settings))
        return pipeline


def overlong(model: ModelConfig, texts: Sequence[str]) -> tuple[int, list[str]]:
    """Find the texts that every text encoder of a model cuts; for a hub id, only small files are downloaded.

    Args:
        model: the model's config.
        texts: the prompts.

    Returns:
        Tokens that the encoder with the largest limit reads, and the texts that are longer; none without tokenizers.

    Raises:
        ModelError: the model's tokenizers cannot be read.
    """
    index, folder = find_configs(model)
    with quiet_libraries("transformers"):
        tokenizers = [read_tokenizer(folder, part) for part in index.parts if part.startswith("tokenizer")]
        if not tokenizers:
            return 0, []

        def limit_of(tokenizer: Any) -> int:
            is_clip = type(tokenizer).__name__.startswith("CLIP")
            return tokenizer.model_max_length if is_clip else model.max_sequence_length

        roomiest = max(tokenizers, key=limit_of)
        limit, rows = limit_of(roomiest), roomiest([_asked(roomiest, text) for text in texts])["input_ids"]
    return limit, [text for text, row in zip(texts, rows, strict=True) if len(row) > limit]


def _asked(tokenizer: Any, text: str) -> str:
    """Return the text as its encoder reads it: inside its chat template, if it has one."""
    if not tokenizer.chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
