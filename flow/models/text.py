"""The encoders of prompts and their condition images: loaded when a prompt first needs them, and freed on request."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flow.models.contract import Conditioning
from flow.models.located import Located, locate
from flow.models.parts import (
    is_tokenizer,
    pipeline_of,
    read_part,
    read_text_parts,
    read_tokenizer,
    transformer_settings,
)
from flow.models.reading import dtype_of, quiet_libraries, vae_dtype_of
from protocol.config.model import ModelConfig
from protocol.ground.condition_images import read_condition
from protocol.messages import ConditionImage

Encode = Callable[[Any, str, Sequence[np.ndarray], ModelConfig, torch.device], Conditioning]
"""A family's `encode_whole(pipeline, text, images, config, device)`: one prompt with its condition images."""


class TextEncoders:
    """Tokenizers and text encoders of a model, without its transformer; the VAE if a prompt may have images."""

    def __init__(self, located: Located, *, encode: Encode, device: torch.device) -> None:
        self.located = located
        self.device = device
        self._encode = encode
        self._pipeline: Any = None

    def encode(self, text: str, conditions: tuple[ConditionImage, ...] = ()) -> Conditioning:
        """Return one prompt's embeddings on the encoders' device.

        Raises:
            ModelError: the encoders cannot be read.
            PromptError: a condition image is not there any more, or has changed.
        """
        self.load()
        images = [read_condition(each) for each in conditions]
        return self._encode(self._pipeline, text, images, self.located.model, self.device)

    def load(self) -> None:
        """Load the encoders unless they are in memory.

        Raises:
            ModelError: they cannot be read.
        """
        if self._pipeline is None:
            self._pipeline = self._load()

    def free(self) -> None:
        self._pipeline = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Any:
        model = self.located.model
        if model.embedding_cache:  # so they may not be here yet
            self.located = locate(model, is_whole=True)
        with quiet_libraries():
            parts = read_text_parts(self.located, dtype=dtype_of(model))
            has_vae = self.located.family.most_conditions > 0
            vae = read_part(self.located, "vae", dtype=vae_dtype_of(model)) if has_vae else None
            for module in (*parts.values(), vae):
                if isinstance(module, torch.nn.Module):
                    module.requires_grad_(requires_grad=False).eval().to(self.device)
            pipeline = pipeline_of(self.located, parts, transformer=None, vae=vae)
            # The pipeline reads only the transformer's config: the width of the zeros that replace an absent encoder.
            settings = transformer_settings(self.located)
        pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**settings))
        return pipeline


def overlong(located: Located, texts: Sequence[str]) -> tuple[int, list[str]]:
    """Find the texts that every text encoder of a model cuts.

    Returns:
        Tokens that the encoder with the largest limit reads, and the texts that are longer; none without tokenizers,
        and where images are read with the text, since then nothing is cut.

    Raises:
        ModelError: the model's tokenizers cannot be read.
    """
    if located.family.reads_images:
        return 0, []
    with quiet_libraries("transformers"):
        tokenizers = [read_tokenizer(located, part) for part in located.parts if is_tokenizer(part)]
        if not tokenizers:
            return 0, []

        def limit_of(tokenizer: Any) -> int:
            is_clip = type(tokenizer).__name__.startswith("CLIP")
            return tokenizer.model_max_length if is_clip else located.model.max_sequence_length

        roomiest = max(tokenizers, key=limit_of)
        limit, rows = limit_of(roomiest), roomiest([_asked(roomiest, text) for text in texts])["input_ids"]
    return limit, [text for text, row in zip(texts, rows, strict=True) if len(row) > limit]


def _asked(tokenizer: Any, text: str) -> str:
    """Return the text as its encoder reads it: inside its chat template, if it has one."""
    if not tokenizer.chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
