"""Scenes of the toy world for tests."""

from toyworld.world.scenes import Scene, Shape
from toyworld.world.vocabulary import PALETTE


def one_shape(label: str, color: str, x: float = 16.0, y: float = 16.0, radius: float = 5.5) -> Scene:
    """A scene of a single shape of the palette's exact colour."""
    shape = Shape(label=label, color=color, rgb=PALETTE[color], center=(x, y), radius=radius)
    return Scene(shapes=(shape,))
