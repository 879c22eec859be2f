"""What a model was made for: the size of its images, and few steps if it is a distilled one. Read from config files."""

import json
import re
from typing import Any

from flow.models.folder import find_configs
from protocol.config.model import ModelConfig
from protocol.errors import ModelError

DISTILLED_NAMES = ("turbo", "schnell", "lightning", "hyper", "lcm")
"""Words by which distilled models are named."""
SIDE = 1024
"""Default side of an image in the families whose config files name none, in pixels."""


def native_side(model: ModelConfig) -> int | None:
    """Return the side, in pixels, of the images that a model makes if no size is configured; None if no file tells.

    Raises:
        ModelError: the model does not exist, or a config file cannot be read.
    """
    transformer = _config(model, "transformer")
    if "sample_size" not in transformer:
        return SIDE
    vae = _config(model, "vae")
    levels = vae.get("decoder_block_out_channels") or vae.get("block_out_channels")  # the former of a tiny VAE
    return transformer["sample_size"] * 2 ** (len(levels) - 1) if levels else None


def distilled_by(model: ModelConfig) -> str | None:
    """Return the sign by which a model is one that was distilled to few steps; None if there is none.

    A name is a weak sign, and the only one that Z-Image-Turbo and SD3.5-Large-Turbo give.

    Raises:
        ModelError: the model does not exist, or a config file cannot be read.
    """
    index, _ = find_configs(model)
    if _config(model, "").get("is_distilled"):
        return "its model_index.json says is_distilled"
    if index.family.name == "flux" and not _config(model, "transformer").get("guidance_embeds"):
        return "it is a FLUX.1 without embedded guidance, like schnell"
    words = re.split(r"[^a-z]+", model.path.rstrip("/").rsplit("/", 1)[-1].lower())
    named = next((word for word in DISTILLED_NAMES if word in words), None)
    return f"it is named {named}" if named else None


def _config(model: ModelConfig, part: str) -> dict[str, Any]:
    _, folder = find_configs(model)
    file = folder / part / "config.json" if part else folder / "model_index.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} of model {model.path} cannot be read: {error}") from error
