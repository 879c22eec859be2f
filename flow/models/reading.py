"""How diffusers and transformers read a model folder: dtypes, log level, tokens of a CLIP."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch

from protocol.config.model import ModelConfig

CLIP_TOKENS = 77
"""Tokens of every published CLIP text encoder."""


def dtype_of(config: ModelConfig) -> torch.dtype:
    return getattr(torch, config.dtype)


def vae_dtype_of(config: ModelConfig) -> torch.dtype:
    return getattr(torch, config.vae_dtype or config.dtype)


@contextmanager
def quiet_libraries(*names: str) -> Iterator[None]:
    """Let the named libraries, by default diffusers and transformers, log errors only, without progress bars.

    This also silences the notices of their first import, such as the one about a missing torchvision.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    libraries = [import_module(f"{name}.utils.logging") for name in names or ("diffusers", "transformers")]
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, (verbosity, has_bar) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if has_bar:
                library.enable_progress_bar()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let Python search for no garbage inside the block.

    While libraries are imported and models made, it would search their several hundred thousand objects again and
    again, for a fifth of the time, and find none.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def clip_tokens(folder: Path) -> int:
    """Return the number of tokens to which a model's CLIP tokenizer pads; 77 if its folder does not say."""
    try:
        settings = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return CLIP_TOKENS
    return settings.get("model_max_length", CLIP_TOKENS)
