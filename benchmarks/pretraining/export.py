"""The finished model folder: an ordinary StableDiffusion3Pipeline in diffusers' format, float16 safetensors.

`write_pipeline` writes the trained parts; the folder appears complete or not at all.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from benchmarks.pretraining.tokenizer import build as build_tokenizer
from benchmarks.pretraining.transformer import VelocityModel
from protocol.ground.files import whole

SHIFT = 3.0
"""The scheduler's shift, as in Stable Diffusion 3."""

UNWANTED_KEYS = ("_name_or_path", "name_or_path", "block_out_channels")
"""Config keys that hold a path of the training machine, or that AutoencoderTiny derives itself and warns about."""

TOYWORLD = Path(__file__).parents[2] / "toyworld"
"""The package that holds the shipped models."""


def write_pipeline(autoencoder: AutoencoderTiny, model: VelocityModel, folder: Path) -> None:
    """Save the pipeline as `folder`, and replace an older one.

    `StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)` loads it.

    Args:
        autoencoder: the trained VAE.
        model: the trained transformer and text encoders.
        folder: path of the pipeline.
    """
    parts: dict[str, Any] = {
        "transformer": model.transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        "vae": autoencoder,
        "text_encoder": model.text_encoder,
        "tokenizer": build_tokenizer(),
        "text_encoder_2": model.text_encoder_2,
        "tokenizer_2": build_tokenizer(),
        "text_encoder_3": None,
        "tokenizer_3": None,
    }
    pipeline = StableDiffusion3Pipeline(**parts)
    with replacing(folder) as partial:
        pipeline.to(torch.float16).save_pretrained(partial, safe_serialization=True)
    pipeline.to(torch.float32)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a path to save a model to, which then replaces `folder` without machine paths and private file modes."""
    with whole(folder) as partial:
        yield partial
        _tidy(partial)
        shutil.rmtree(folder, ignore_errors=True)


def _tidy(partial: Path) -> None:
    for path in partial.rglob("*.json"):
        settings: dict[str, Any] = json.loads(path.read_text())
        if any(key in settings for key in UNWANTED_KEYS):
            kept = {key: value for key, value in settings.items() if key not in UNWANTED_KEYS}
            path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    for path in partial.rglob("*.safetensors"):
        path.chmod(0o644)
