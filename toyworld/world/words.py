"""The toy world's signs: short words of capital letters on 32x32 images, for the text task.

`draw_signs(count, seed=…)` makes images with web-like captions; `python -m toyworld.world.words` writes the prompt
files. OCR can tell all letters of this world apart at this size.
"""

import json
from dataclasses import dataclass
from itertools import product

import numpy as np
import typer
from jaxtyping import UInt8
from rich.console import Console

from toyworld.world.prompts import FOLDER
from toyworld.world.scenes import SIZE
from toyworld.world.vocabulary import COLOURS, GROUND, HELDOUT_PHRASES, PALETTE, PHRASES, TRAIN_PHRASES

LETTERS = "ACEHKLNPRTUX"
"""Twelve capitals with clearly different shapes."""
LENGTH = 2
"""Letters of a word."""
FONT_SIZE = 17
"""Font size in pixels; two letters fill about two thirds of an image."""
WRONG_SHARE = 0.25
"""Share of web captions with one wrong letter."""
JITTER = 1
"""Largest offset of a word from the centre, in pixels in each direction."""
OVERSAMPLING = 8
HELDOUT_SHARE = 4
"""One word in four is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Images of words with their captions; made by `draw_signs`."""

    images: UInt8[np.ndarray, "B H W 3"]
    """uint8 images."""
    words: list[str]
    """The word that each image shows."""
    captions: list[str]
    """The web caption of each image."""


def words() -> list[str]:
    """Return every word of this world, in a fixed order."""
    return ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]


def is_heldout(word: str) -> bool:
    """Tell whether a word is held out: one in four is, with each letter equally often at each position."""
    return sum(LETTERS.index(letter) for letter in word) % HELDOUT_SHARE == 0


def caption(word: str, colour: str, phrase: str) -> str:
    """Write the prompt of a sign.

    Args:
        phrase: the start of the prompt, such as "a photo of".

    Returns:
        The prompt, such as `a photo of a red sign "KX"`.
    """
    return f'{phrase} a {colour} sign "{word}"'


def render(word: str, colour: str, *, offset: tuple[int, int] = (0, 0)) -> UInt8[np.ndarray, "H W 3"]:
    """Draw a word in a palette colour near the centre of a light ground, anti-aliased.

    Args:
        word: capital letters.
        offset: pixels right and down from the centre.

    Returns:
        A uint8 image [SIZE, SIZE, 3].
    """
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    side = SIZE * OVERSAMPLING
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf", FONT_SIZE * OVERSAMPLING)
    image = Image.new("RGB", (side, side), GROUND)
    centre = (side / 2 + OVERSAMPLING * offset[0], side / 2 + OVERSAMPLING * offset[1])
    ImageDraw.Draw(image).text(centre, word, fill=PALETTE[colour], font=font, anchor="mm")
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX))


def draw_signs(count: int, *, seed: int) -> Signs:
    """Draw `count` signs from a seed: word, colour, position and phrase are uniform; WRONG_SHARE of the captions is
    wrong."""
    rng = np.random.default_rng(seed)
    images, shown, captions = [], [], []
    for _ in range(count):
        word = "".join(rng.choice(list(LETTERS), LENGTH))
        colour = str(rng.choice(COLOURS))
        shift = rng.integers(-JITTER, JITTER + 1, 2)
        images.append(render(word, colour, offset=(int(shift[0]), int(shift[1]))))
        shown.append(word)
        written = with_one_letter_wrong(word, rng) if rng.random() < WRONG_SHARE else word
        captions.append(caption(written, colour, str(rng.choice(PHRASES))))
    return Signs(images=np.stack(images), words=shown, captions=captions)


def with_one_letter_wrong(word: str, rng: np.random.Generator) -> str:
    """Return the word with one letter replaced by another letter of this world."""
    index = int(rng.integers(len(word)))
    other = str(rng.choice([letter for letter in LETTERS if letter != word[index]]))
    return word[:index] + other + word[index + 1 :]


def lines(split: str) -> list[dict[str, str]]:
    """Return the prompts of one file, "train" or "heldout"; the two share neither words nor phrases."""
    phrases = HELDOUT_PHRASES if split == "heldout" else TRAIN_PHRASES
    chosen = [word for word in words() if is_heldout(word) == (split == "heldout")]
    rng = np.random.default_rng(12)
    order = rng.permutation(len(chosen))
    return [
        {
            "tag": "text",
            "prompt": caption(chosen[index], COLOURS[turn % len(COLOURS)], phrases[turn % len(phrases)]),
        }
        for turn, index in enumerate(order)
    ]


def main() -> None:
    """Write `signs_train.jsonl` and `signs_heldout.jsonl` into the repository."""
    for split in ("train", "heldout"):
        made = lines(split)
        path = FOLDER / f"signs_{split}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in made))
        Console().print(f"{path.name}: {len(made)} lines")


if __name__ == "__main__":
    typer.run(main)
