"""The words of the toy world: its shapes, colours, numbers, relations and phrasings.

Everything that draws, reads, writes or tokenises a caption takes its words from here.
"""

SHAPES = ("circle", "square", "triangle")
PALETTE = {
    "red": (220, 50, 47),
    "green": (40, 160, 70),
    "blue": (45, 85, 210),
    "yellow": (240, 195, 20),
}
"""Colour name (all are in GenEval's list of ten) to its nominal sRGB value, 0-255."""

COLOURS = tuple(PALETTE)
GROUND = (243, 241, 236)
"""The light ground every image is drawn on, sRGB 0-255."""

NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

TRAIN_PHRASES = (
    "a photo of",
    "a picture of",
    "an image of",
    "a drawing of",
    "a painting of",
    "a page with",
    "a poster of",
    "a card with",
)
HELDOUT_PHRASES = (
    "a print of",
    "a sketch of",
    "a view of",
    "a tile with",
    "a sign with",
    "an icon of",
    "a stamp of",
    "a scan of",
)
PHRASES = TRAIN_PHRASES + HELDOUT_PHRASES


def plural(shape: str) -> str:
    """The plural of a shape's name."""
    return shape + "s"


def words() -> list[str]:
    """Every word a caption of this world can hold, each once, in a fixed order."""
    text = [*PHRASES, *SHAPES, *map(plural, SHAPES), *COLOURS, *NUMBERS.values(), *RELATIONS, "and"]
    return list(dict.fromkeys(word for piece in text for word in piece.split()))
