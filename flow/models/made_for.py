"""What a model was made for, by its config files: sizes of images, and few steps if it was distilled."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flow.models.folder import find_configs, read_settings
from flow.models.hub import INDEX
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError

DISTILLED_NAMES = ("turbo", "schnell", "lightning", "hyper", "lcm")
"""Words in the names of distilled models."""
SIDE = 1024
"""Default side of an image in the families whose config files name none, in pixels."""
FILLED = 32
"""Z-Image fills a prompt to a multiple of this many tokens."""
PACK = 2
"""Side of a token in latents, in the families whose pipeline packs the latents."""


@dataclass(frozen=True)
class Sizes:
    """Which images a model can make; all in pixels."""

    scale: int
    """Side of a latent."""
    token: int
    """Side of a token, of which height and width are multiples."""
    most: int | None
    """Largest height and width: where the position embeddings end; None without a limit."""

    def require(self, height: int, width: int, *, names: tuple[str, str] = ("model.height", "model.width")) -> None:
        """Check that the model can make images of this size.

        Args:
            height: in pixels.
            width: in pixels.
            names: keys of both, for the error.

        Raises:
            ModelError: it cannot.
        """
        both, got = " and ".join(names), f"got {height} and {width}"
        if height % self.token or width % self.token:
            raise ModelError(f"{both} must be multiples of {self.token}, {got}")
        if self.most and max(height, width) > self.most:
            raise ModelError(f"{both} must be at most {self.most} for this model's position embeddings, {got}")


def sizes_of(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Sizes:
    """Return which images a model can make, by the config of its transformer and of its VAE.

    Raises:
        ModelError: the VAE's config does not say how small its latents are.
    """
    positions = transformer.get("pos_embed_max_size")
    scale = _scale(vae)
    token = scale * (transformer.get("patch_size", PACK) if positions else PACK)
    return Sizes(scale=scale, token=token, most=positions and positions * token)


def require_sizes(config: RunConfig) -> None:
    """Check that the model can make images of the sizes of training and of evaluation, and take the longest prompt.

    Raises:
        ModelError: it cannot, it does not exist, or a config file cannot be read.
    """
    model = config.model
    _require_length(model, _config(model, "transformer"))
    if model.height and model.width:
        require_size(model, model.height, model.width)
    if config.evaluation.size:
        require_size(model, *config.evaluation.size, names=("evaluation.height", "evaluation.width"))


def _require_length(model: ModelConfig, transformer: Mapping[str, Any]) -> None:
    """Check that the longest prompt fits a transformer that numbers prompt and image on one axis, as Z-Image's does.

    It fills the prompt to a multiple of `FILLED` tokens, numbers them from 1, and gives the image the next number.
    """
    if not (lengths := transformer.get("axes_lens")):
        return
    most = (lengths[0] - 2) // FILLED * FILLED
    if model.max_sequence_length > most:
        raise ModelError(
            f"model.max_sequence_length must be at most {most} for this model's {lengths[0]} positions, got"
            f" {model.max_sequence_length}: lower it"
        )


def require_size(
    model: ModelConfig, height: int, width: int, *, names: tuple[str, str] = ("model.height", "model.width")
) -> None:
    """Check that a model can make images of a size, by its config files.

    Args:
        model: the model's config.
        height: in pixels.
        width: in pixels.
        names: keys of both, for the error.

    Raises:
        ModelError: it cannot, it does not exist, or a config file cannot be read.
    """
    sizes_of(_config(model, "transformer"), _config(model, "vae")).require(height, width, names=names)


def native_side(model: ModelConfig) -> int:
    """Return the side, in pixels, of the images that a model makes if no size is configured.

    Raises:
        ModelError: the model does not exist, or a config file cannot be read.
    """
    transformer = _config(model, "transformer")
    if "sample_size" not in transformer:
        return SIDE
    return transformer["sample_size"] * _scale(_config(model, "vae"))


def distilled_by(model: ModelConfig) -> str | None:
    """Return the evidence that a model was distilled to few steps; None if there is none.

    A name is weak evidence, but Z-Image-Turbo and SD3.5-Large-Turbo have nothing else.

    Raises:
        ModelError: the model does not exist, or a config file cannot be read.
    """
    index, _ = find_configs(model)
    if _config(model).get("is_distilled"):
        return "its model_index.json says is_distilled"
    if index.family.name == "flux" and not _config(model, "transformer").get("guidance_embeds"):
        return "it is a FLUX.1 without embedded guidance, like schnell"
    words = re.split(r"[^a-z]+", model.path.rstrip("/").rsplit("/", 1)[-1].lower())
    named = next((word for word in DISTILLED_NAMES if word in words), None)
    return f"it is named {named}" if named else None


def _scale(vae: Mapping[str, Any]) -> int:
    """Return the pixels of a latent's side: each level halves the image. A video VAE lists its levels elsewhere."""
    if "temperal_downsample" in vae:
        return 2 ** len(vae["temperal_downsample"])
    levels = vae.get("decoder_block_out_channels") or vae.get("block_out_channels")  # the first key is a tiny VAE's
    if not levels:
        raise ModelError(
            "the config of a model's VAE must name block_out_channels, got none: is it in diffusers' format?"
        )
    return 2 ** (len(levels) - 1)


def _config(model: ModelConfig, part: str = "") -> dict[str, Any]:
    _, folder = find_configs(model)
    return read_settings(folder / part / "config.json" if part else folder / INDEX)
