"""Images as files in memory: PNG, which is lossless, and JPEG for servers that open nothing else."""

import io

import numpy as np

from protocol.errors import FlowcreditError

MOST_PIXELS = 64 * 1024 * 1024
"""Pixels of one image that are decoded; what claims to be larger is refused before it takes memory."""

FORMATS = ("PNG", "JPEG", "WEBP")
"""What is decoded; Pillow's decoders of rarer formats fail in ways of their own."""


class ImageError(FlowcreditError):
    """Bytes that are no image of `FORMATS`, or one that is too large."""


def encode_png(image: np.ndarray) -> bytes:
    """An image uint8 [H, W, 3] as PNG, lossless."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return file.getvalue()


def encode_jpeg(image: np.ndarray, *, quality: int) -> bytes:
    """An image uint8 [H, W, 3] as JPEG without chroma subsampling; `quality` is 1 (worst) to 100."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=quality, subsampling=0)
    return file.getvalue()


def decode_image(data: bytes) -> np.ndarray:
    """An image file as uint8 [H, W, 3].

    Raises:
        ImageError: not an image that can be read, or one of more than `MOST_PIXELS` pixels.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ImageError(f"an image must have at most {MOST_PIXELS} pixels, got {width}x{height}")
            return np.array(image.convert("RGB"))
    except Image.UnidentifiedImageError:
        raise ImageError(f"an image must be a PNG, JPEG or WebP file, got {len(data)} other bytes") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"an image must be a PNG, JPEG or WebP file that can be read: {error}") from None
