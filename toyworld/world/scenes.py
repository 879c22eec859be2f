"""Scenes: a few coloured shapes on a light ground that satisfy a GenEval metadata line.

`sample_scene(metadata, rng)` arranges the shapes; `render(scene)` draws them as an anti-aliased uint8 image.
"""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from toyworld.world.vocabulary import COLOURS, GROUND, PALETTE

SIZE = 32
"""Height and width of an image, in pixels."""

MIN_RADIUS, MAX_RADIUS, MAX_RADIUS_MANY = 4.4, 6.2, 5.2
"""Smallest and largest radius of a shape in pixels, and the largest in a scene of more than two."""
MARGIN = 0.6
"""Least distance of a shape from the image's border, in pixels."""
GAP = 1.6
"""Least gap between two shapes, in pixels."""
COLOUR_JITTER = 10
"""Largest change of each sRGB channel (0-255) of a shape's colour."""

SQUARE_HALF_SIDE = 0.8862
"""Half side of a square divided by its radius: the square has the area of the circle with that radius."""

TRIANGLE_REACH = 1.25
"""Distance from centroid to corner of the (equilateral, upright) triangle divided by its radius."""

_HALF_ROOT_3 = math.sqrt(0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape: class, colour name, sRGB value, and centroid (x, y) and radius in pixels."""

    label: str
    color: str
    rgb: tuple[int, int, int]
    center: tuple[float, float]
    radius: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Bounding box x0, y0, x1, y1 in pixels."""
        x, y = self.center
        left, up, right, down = extents(self.label, self.radius)
        return (x - left, y - up, x + right, y + down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The shapes of one image, in the order of the metadata's `include` list."""

    shapes: tuple[Shape, ...]


def extents(label: str, radius: float) -> tuple[float, float, float, float]:
    """Return the extents of a shape from its centroid: left, up, right and down, in pixels."""
    if label in ("circle", "square"):
        reach = radius if label == "circle" else SQUARE_HALF_SIDE * radius
        return (reach, reach, reach, reach)
    half_width = TRIANGLE_REACH * _HALF_ROOT_3 * radius
    return (half_width, TRIANGLE_REACH * radius, half_width, TRIANGLE_REACH * radius / 2)


def signed_distance(label: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """Return the distance of points from the outline of a shape that is centred on the origin.

    Args:
        dx: x of the points, in pixels; of any shape, such as [1, W].
        dy: y of the points, in pixels, downwards; its shape broadcasts with dx's, such as [H, 1].
        radius: the shape's radius in pixels.

    Returns:
        Distances in pixels, negative inside, in the shape to which dx and dy broadcast, such as [H, W].
    """
    if label == "circle":
        return np.hypot(dx, dy) - radius
    if label == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - SQUARE_HALF_SIDE * radius
    sides = np.abs(dx) * _HALF_ROOT_3 - dy / 2
    return np.maximum(dy, sides) - TRIANGLE_REACH * radius / 2


def render(scene: Scene) -> np.ndarray:
    """Draw a scene as a uint8 image [SIZE, SIZE, 3]; outlines are anti-aliased over one pixel."""
    canvas = np.empty((SIZE, SIZE, 3), np.float32)
    canvas[:] = GROUND
    for shape in scene.shapes:
        x0, y0, x1, y1 = shape.box
        left, top = max(int(x0) - 1, 0), max(int(y0) - 1, 0)
        right, bottom = min(int(x1) + 2, SIZE), min(int(y1) + 2, SIZE)
        dy, dx = np.ogrid[top:bottom, left:right]
        distance = signed_distance(shape.label, dx + 0.5 - shape.center[0], dy + 0.5 - shape.center[1], shape.radius)
        cover = np.clip(0.5 - distance, 0, 1)[..., None].astype(np.float32)
        patch = canvas[top:bottom, left:right]
        patch += cover * (np.asarray(shape.rgb, np.float32) - patch)
    return np.rint(canvas).astype(np.uint8)


def sample_scene(metadata: dict[str, Any], rng: np.random.Generator) -> Scene:
    """Sample a scene that satisfies a GenEval metadata line.

    Args:
        metadata: one line of a prompt file; `include` lists classes with count, and may give colours and a position.
        rng: the only source of randomness.

    Raises:
        ValueError: 1000 tries found no scene, because the line asks for more shapes than fit into an image.
    """
    wanted = [item for item in metadata["include"] for _ in range(item["count"])]
    relation = next((item["position"][0] for item in metadata["include"] if "position" in item), None)
    for _ in range(1000):
        boxes = _arrange([item["class"] for item in wanted], rng)
        if boxes is not None and (relation is None or relation in relations(boxes[1][2], boxes[0][2], clear=0.75)):
            return Scene(shapes=tuple(_coloured(item, *box[:2], rng) for item, box in zip(wanted, boxes, strict=True)))
    raise ValueError(f"a scene must hold its shapes without touching, got {metadata['include']}: ask for fewer")


def relations(
    first: tuple[float, float, float, float], second: tuple[float, float, float, float], *, clear: float = 0.5
) -> set[str]:
    """Return the relations of the first box to the second by GenEval's rule.

    On each axis the offset of the centres is shortened by a tenth of the sum of the sizes and divided by the offset's
    length. A component above `clear` is a relation.

    Args:
        first: x0, y0, x1, y1 in pixels, y downwards.
        clear: the threshold in [0, 1]; GenEval's is 0.5.

    Returns:
        Names such as "left of"; none if the boxes are too close.
    """
    a, b = np.asarray(first).reshape(2, 2), np.asarray(second).reshape(2, 2)
    offset = (a.sum(0) - b.sum(0)) / 2
    short = np.maximum(np.abs(offset) - 0.1 * ((a[1] - a[0]) + (b[1] - b[0])), 0) * np.sign(offset)
    if not short.any():
        return set()
    dx, dy = short / np.linalg.norm(offset)
    found = {"left of": dx < -clear, "right of": dx > clear, "above": dy < -clear, "below": dy > clear}
    return {name for name, holds in found.items() if holds}


def fits(scene: Scene) -> bool:
    """Tell whether all shapes lie within the image and none touch, by the margins of sampled scenes."""
    boxes = [shape.box for shape in scene.shapes]
    is_inside = all(min(box) >= MARGIN and max(box) <= SIZE - MARGIN for box in boxes)
    return is_inside and all(_apart(a, b) for a, b in combinations(boxes, 2))


def _arrange(labels: list[str], rng: np.random.Generator) -> list[tuple[tuple[float, float], float, tuple]] | None:
    """Place the shapes so that none touch; return centre, radius and box of each, or None if this try failed."""
    many = len(labels) > 2
    cells = rng.permutation(4)
    placed: list[tuple[tuple[float, float], float, tuple]] = []
    for index, label in enumerate(labels):
        radius = float(rng.uniform(MIN_RADIUS, MAX_RADIUS_MANY if many else MAX_RADIUS))
        left, up, right, down = extents(label, radius)
        low = np.array([left, up]) + MARGIN
        high = SIZE - MARGIN - np.array([right, down])
        if many:
            row, column = divmod(int(cells[index]), 2)
            corner = np.where([column, row], np.maximum(low, high - 8.5), low)
            low, high = corner, np.minimum(corner + 8.5, high)
        for _ in range(20):
            x, y = rng.uniform(low, high)
            box = (x - left, y - up, x + right, y + down)
            if all(_apart(box, other[2]) for other in placed):
                placed.append(((float(x), float(y)), radius, box))
                break
        else:
            return None
    return placed


def _apart(a: tuple, b: tuple) -> bool:
    """Tell whether two boxes have a gap of at least GAP between them."""
    return a[2] + GAP < b[0] or b[2] + GAP < a[0] or a[3] + GAP < b[1] or b[3] + GAP < a[1]


def _coloured(item: dict[str, Any], center: tuple[float, float], radius: float, rng: np.random.Generator) -> Shape:
    """Give a placed shape the colour that its metadata names, or a random one."""
    color = item.get("color") or str(rng.choice(COLOURS))
    jitter = rng.integers(-COLOUR_JITTER, COLOUR_JITTER + 1, 3)
    red, green, blue = (int(c) for c in np.clip(np.add(PALETTE[color], jitter), 0, 255))
    return Shape(label=item["class"], color=color, rgb=(red, green, blue), center=center, radius=radius)
