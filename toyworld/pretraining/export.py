"""The finished model folder: an ordinary StableDiffusion3Pipeline in diffusers' format, float16 safetensors.

`write_pipeline` writes the trained parts; the folder appears complete or not at all.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from toyworld.pretraining.tokenizer import build as build_tokenizer
from toyworld.pretraining.transformer import VelocityModel

SHIFT = 3.0
"""The scheduler's shift, as in Stable Diffusion 3."""

UNWANTED_KEYS = ("_name_or_path", "name_or_path", "block_out_channels")
"""Config keys that hold a path of the training machine, or that AutoencoderTiny derives itself and warns about."""


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
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.to(torch.float16).save_pretrained(partial, safe_serialization=True)
    replace_folder(partial, folder)
    pipeline.to(torch.float32)


def replace_folder(partial: Path, folder: Path) -> None:
    """Remove machine paths and private file modes from a finished folder, and rename it over an older one."""
    for path in partial.rglob("*.json"):
        settings: dict[str, Any] = json.loads(path.read_text())
        if any(key in settings for key in UNWANTED_KEYS):
            kept = {key: value for key, value in settings.items() if key not in UNWANTED_KEYS}
            path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    for path in partial.rglob("*.safetensors"):
        path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
