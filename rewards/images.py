"""Encode and decode image files in memory: PNG, which is lossless, and JPEG for servers that need it; resize images."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from protocol.errors import FlowcreditError

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 64 * 1024 * 1024
"""Largest number of pixels of an image that is decoded; a larger one is refused before it takes memory."""

FORMATS = ("PNG", "JPEG", "WEBP")
"""The formats that are decoded; Pillow's decoders of rarer formats fail in unpredictable ways."""


class ImageError(FlowcreditError):
    """The bytes are not an image of one of `FORMATS`, or the image is too large."""


def encode_png(image: np.ndarray) -> bytes:
    """Encode an image uint8 [H, W, 3] as PNG, which is lossless."""
    from PIL import Image

    return encoded(Image.fromarray(image), "PNG", compress_level=1)


def encode_jpeg(image: np.ndarray, *, quality: int) -> bytes:
    """Encode an image uint8 [H, W, 3] as JPEG without chroma subsampling; `quality` is 1 (worst) to 100."""
    from PIL import Image

    return encoded(Image.fromarray(image), "JPEG", quality=quality, subsampling=0)


def encoded(image: "Image.Image", kind: str, **options: Any) -> bytes:
    """Encode a Pillow image as `kind`, such as `PNG`; `options` go to its `save`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decode_image(data: bytes, *, most_pixels: int = MOST_PIXELS) -> np.ndarray:
    """Decode an image file to uint8 [H, W, 3].

    Raises:
        ImageError: the file is not a readable image, or has more than `most_pixels` pixels.
    """
    with _opened(data) as image:
        width, height = image.size
        if width * height > most_pixels:
            raise ImageError(f"an image must have at most {most_pixels} pixels, got {width}x{height}")
        return np.array(image.convert("RGB"))


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image uint8 [H, W, 3], bicubic; one of this size is returned itself."""
    from PIL import Image

    if image.shape[:2] == (height, width):
        return image
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def pixels_of(data: bytes) -> int:
    """Read from an image file's header how many pixels it has, without decoding it (ImageError: not readable)."""
    with _opened(data) as image:
        return image.width * image.height


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open the file as a Pillow image, which is decoded when its pixels are needed (ImageError: not readable)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except Image.UnidentifiedImageError:
        raise ImageError(f"an image must be a PNG, JPEG or WebP file, got {len(data)} other bytes") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"an image must be a PNG, JPEG or WebP file that can be read: {error}") from None
