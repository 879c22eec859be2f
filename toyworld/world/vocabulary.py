"""The vocabulary of the toy world: shapes, colours, numbers, relations and phrases.

Prompts, captions, scenes, detector and tokenizer all take their words from here.
"""

SHAPES = ("circle", "square", "triangle")
PALETTE = {
    "red": (220, 50, 47),
    "green": (40, 160, 70),
    "blue": (45, 85, 210),
    "yellow": (240, 195, 20),
}
"""Nominal sRGB value (0-255) of each colour name; all names are among GenEval's ten."""

COLOURS = tuple(PALETTE)
GROUND = (243, 241, 236)
"""sRGB value (0-255) of the ground of every image."""

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
    return shape + "s"


def words() -> list[str]:
    """Return every word that a caption can hold, each once, in a fixed order."""
    text = [*PHRASES, *SHAPES, *map(plural, SHAPES), *COLOURS, *NUMBERS.values(), *RELATIONS, "and"]
    return list(dict.fromkeys(word for piece in text for word in piece.split()))
