"""The toy world's object detector: classical computer vision for coloured shapes, without torch.

`ShapeDetector().detect(images)` segments an image by colour and compares each blob with ideal shapes of its size. A
blob that fits no shape well (a smear, half a shape, two touching shapes) is not an object.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float, UInt8

from protocol.messages import Detection
from toyworld.world.scenes import extents, signed_distance
from toyworld.world.vocabulary import GROUND, PALETTE, SHAPES

MIN_RADIUS, MAX_RADIUS = 3.2, 8.0
"""Smallest and largest radius of an object, in pixels."""

MIN_SCORE = 0.80
"""Least overlap (soft intersection over union) of an object's blob with an ideal shape."""

MAX_COLOUR_DISTANCE = 60.0
"""Largest distance in sRGB (0-255) between a blob's inner colour and the palette colour that names it."""

UNIT_AREA = {"circle": np.pi, "square": np.pi, "triangle": 0.75 * np.sqrt(3) * 1.25**2}
"""Area of each shape of radius 1, in square pixels."""

cv2.setNumThreads(1)  # for images this small a second thread of OpenCV only waits, and takes a core for it

_GROUND = np.asarray(GROUND, np.float32)
_COLOURS = np.asarray(list(PALETTE.values()), np.float32)
_NAMES = tuple(PALETTE)
_ANCHORS = np.vstack([_GROUND, _COLOURS])
_HALF_SQUARES = 0.5 * np.square(_ANCHORS).sum(1)
_CENTRES = np.arange(4 + 3 * int(MAX_RADIUS)) + 0.5
"""Middles of the pixels of a window, which has two pixels around its blob."""
_NEIGHBOURS = np.ones((3, 3), np.uint8)
_LEAST_AREA = UNIT_AREA["circle"] * MIN_RADIUS


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDetector:
    """Detects shapes in images. It has no state, so all threads may share one instance.

    Example:
        detections = ShapeDetector().detect(images)        # uint8 [B, H, W, 3]
        [(d.label, d.color) for d in detections[0]]          # [("circle", "red"), ...]
    """

    min_score: float = MIN_SCORE
    """Least overlap of an object's blob with an ideal shape, in [0, 1]."""
    labels: frozenset[str] = frozenset(SHAPES)
    """The classes that it can detect."""
    colors: frozenset[str] = frozenset(PALETTE)
    """The colours that it can name."""

    def detect(self, images: UInt8[np.ndarray, "B H W 3"], colored: Sequence[Set[str]] = ()) -> list[list[Detection]]:
        """Detect the shapes of each image.

        Args:
            images: uint8 images, one scene each.
            colored: not used; every shape has its colour.

        Returns:
            One list for each image, best score first. Boxes are x0, y0, x1, y1 in pixels; a score is the overlap with
            the ideal shape, in [0, 1].

        Raises:
            ValueError: images is not a uint8 array [B, H, W, 3].
        """
        del colored
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
            kind = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
            raise ValueError(f"images must be a uint8 array, got {kind}: scale to 0-255 and convert")
        if images.ndim != 4 or images.shape[-1] != 3:
            raise ValueError(f"images must have the shape [B, H, W, 3], got {list(images.shape)}: add the batch axis")
        pixels = images.astype(np.float32)
        return [self._detect_one(*each) for each in zip(pixels, nearest_colour(pixels), strict=True)]

    def _detect_one(self, pixels: Float[np.ndarray, "H W 3"], nearest: np.ndarray) -> list[Detection]:
        found = []
        areas = np.bincount(nearest.ravel() + 1, minlength=len(_ANCHORS))[1:]
        for colour in np.flatnonzero(areas >= _LEAST_AREA):
            mask = (nearest == colour).view(np.uint8)
            _, blobs, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
            for blob, (x, y, width, height, area) in enumerate(stats.tolist()[1:], start=1):
                if area >= _LEAST_AREA and max(width, height) <= 3 * MAX_RADIUS:
                    window = (slice(max(y - 2, 0), y + height + 2), slice(max(x - 2, 0), x + width + 2))
                    found.append(self._match(pixels[window], blobs[window] == blob, (nearest[window] >= 0), window))
        return sorted((detection for detection in found if detection), key=lambda detection: -detection.score)

    def _match(
        self, pixels: np.ndarray, blob: np.ndarray, is_coloured: np.ndarray, window: tuple[slice, slice]
    ) -> Detection | None:
        """Return the ideal shape that fits a blob best, or None if none fits well."""
        inside = pixels[cv2.erode(blob.view(np.uint8), _NEIGHBOURS, borderValue=0).view(bool)]
        if len(inside) < 4:
            return None
        inner = np.sort(inside, axis=0)[len(inside) // 2]
        cover = _cover(pixels, inner, blob, is_coloured)
        area = float(cover.sum())
        columns, rows = _CENTRES[: cover.shape[1]], _CENTRES[: cover.shape[0]]
        x, y = float(cover.sum(0) @ columns) / area, float(cover.sum(1) @ rows) / area
        fits = _overlaps(cover, area, columns[None] - x, rows[:, None] - y)
        label = max(fits, key=fits.__getitem__)
        radius = _radius(label, area)
        if fits[label] < self.min_score or not MIN_RADIUS <= radius <= MAX_RADIUS:
            return None
        left, up, right, down = extents(label, radius)
        x, y = x + int(window[1].start), y + int(window[0].start)
        return Detection(
            label=label, color=_name(inner), box=(x - left, y - up, x + right, y + down), score=round(fits[label], 4)
        )


def nearest_colour(pixels: Float[np.ndarray, "B H W 3"]) -> np.ndarray:
    """Return the index of the palette colour nearest to each pixel, or -1 where the ground is nearer (int [B, H, W]).

    All products and sums are whole or half numbers that float32 holds exactly.
    """
    return (pixels @ _ANCHORS.T - _HALF_SQUARES).argmax(-1) - 1


def _cover(pixels: np.ndarray, inner: np.ndarray, blob: np.ndarray, is_coloured: np.ndarray) -> np.ndarray:
    """Return the share of each pixel that the blob covers, in [0, 1].

    The share is the position of the pixel's colour between the ground and the blob's inner colour. It is 0 for pixels
    that are neither in the blob nor next to it, and for pixels of other blobs.
    """
    near = cv2.dilate(blob.view(np.uint8), _NEIGHBOURS).view(bool) & (blob | ~is_coloured)
    towards = inner - _GROUND
    share = (pixels - _GROUND) @ towards / max(float(towards @ towards), 1.0)
    return np.minimum(np.maximum(share, 0), 1) * near


def _overlaps(cover: np.ndarray, area: float, dx: np.ndarray, dy: np.ndarray) -> dict[str, float]:
    """Return the soft intersection over union of a blob and the ideal shape of its area, by the shape's class.

    dx and dy are offsets from the blob's centroid in pixels.
    """
    inside = np.empty((len(SHAPES), *cover.shape))
    for number, label in enumerate(SHAPES):
        np.subtract(0.5, signed_distance(label, dx, dy, _radius(label, area)), out=inside[number])
    np.maximum(inside, 0, out=inside)
    both = np.minimum(cover, inside).sum((1, 2))
    ideal = np.minimum(inside, 1, out=inside).sum((1, 2))
    return dict(zip(SHAPES, (both / (area + ideal - both)).tolist(), strict=True))


def _radius(label: str, area: float) -> float:
    """Return the radius in pixels of the shape that covers `area` square pixels."""
    return math.sqrt(area / UNIT_AREA[label])


def _name(inner: np.ndarray) -> str | None:
    """Return the palette colour nearest to a blob's inner colour, or None if none is near enough."""
    distances = np.linalg.norm(_COLOURS - inner, axis=1)
    index = int(distances.argmin())
    return _NAMES[index] if distances[index] <= MAX_COLOUR_DISTANCE else None
