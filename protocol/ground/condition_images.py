"""The condition images of prompts: checked when a prompt file is read, and read by whoever needs their pixels."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import PromptError, one_line, reason_of
from protocol.messages import ConditionImage

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 64 * 2**20
"""Of one image; a larger one is refused before it is decoded."""
MOST_STRETCHED = 8
"""Greatest ratio of an image's sides, as in FLUX.2's pipeline."""


def condition_of(path: Path) -> ConditionImage:
    """Check an image file whole.

    Raises:
        PromptError: it is missing, broken, too large, animated or of another form.
    """
    data = _read(path)
    _decoded(path, data)
    return ConditionImage(path=str(path), sha256=hashlib.sha256(data).hexdigest())


def read_condition(condition: ConditionImage) -> np.ndarray:
    """Read a condition image, uint8 [H, W, 3]: turned as its EXIF says, without alpha.

    Raises:
        PromptError: the file is not there any more, or has changed.
    """
    path = Path(condition.path)
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != condition.sha256:
        raise PromptError(f"image {path} must not change during a run, got other bytes: put the old file back")
    return np.array(_decoded(path, data))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise PromptError(
            f"image {path} cannot be read: {reason_of(error)}; a relative path begins in the folder of the prompt file"
        ) from None


def _decoded(path: Path, data: bytes) -> Any:
    """Return the image as diffusers' `load_image` does."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            (width, height), frames = image.size, getattr(image, "n_frames", 1)
            if width * height > MOST_PIXELS:
                raise PromptError(f"image {path} must have at most {MOST_PIXELS} pixels, got {width} x {height}")
            if max(width, height) > MOST_STRETCHED * min(width, height):
                raise PromptError(
                    f"image {path} must have sides of a ratio of at most {MOST_STRETCHED}, got {width} x {height}:"
                    " crop it"
                )
            if frames > 1:
                raise PromptError(f"image {path} must be one image, got {frames} frames: save one of them")
            if image.mode.startswith(("I", "F")):
                raise PromptError(f"image {path} must have 8 bits a channel, got mode {image.mode}: save it as RGB")
            return ImageOps.exif_transpose(image).convert("RGB")
    except PromptError:
        raise
    except Exception as error:  # Pillow raises any type for a broken file
        raise PromptError(f"image {path} must be a whole PNG, JPEG or WebP file: {one_line(error)}") from error
