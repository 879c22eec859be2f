"""Pictures as files in memory: lossless PNG, so that a score never depends on a codec."""

import io

import numpy as np

from protocol.errors import FlowcreditError

MOST_PIXELS = 64 * 1024 * 1024
"""Pixels of one picture that are decoded; what claims to be larger is refused before it takes memory."""

FORMATS = ("PNG", "JPEG", "WEBP")
"""What is decoded; Pillow's decoders of rarer formats fail in ways of their own."""


class PictureError(FlowcreditError):
    """Bytes that are no picture of `FORMATS`, or one that is too large."""


def encode_png(image: np.ndarray) -> bytes:
    """A picture uint8 [H, W, 3] as PNG, lossless."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return file.getvalue()


def decode_picture(data: bytes) -> np.ndarray:
    """A picture file as uint8 [H, W, 3].

    Raises:
        PictureError: not a picture that can be read, or one of more than `MOST_PIXELS` pixels.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MOST_PIXELS:
                raise PictureError(f"a picture must have at most {MOST_PIXELS} pixels, got {width}x{height}")
            return np.array(picture.convert("RGB"))
    except Image.UnidentifiedImageError:
        raise PictureError(f"a picture must be a PNG, JPEG or WebP file, got {len(data)} other bytes") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PictureError(f"a picture must be a PNG, JPEG or WebP file that can be read: {error}") from None
