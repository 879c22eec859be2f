"""The pretraining set: images with captions as the web has them, a quarter of which state one fact wrongly.

`draw_examples(count, seed=…)` makes it anew from the seed; nothing is stored.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from toyworld.world.captions import Line, draw_line, with_one_fact_wrong
from toyworld.world.scenes import Scene, render, sample_scene

WRONG_SHARE = 0.25
"""Share of web captions with one wrong fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Images and what is written about them; made by `draw_examples`, read by every training stage."""

    images: UInt8[np.ndarray, "B H W 3"]
    """uint8 images."""
    scenes: list[Scene]
    """What each image shows."""
    true_lines: list[Line]
    """A metadata line that holds of each image."""
    wrong_lines: list[Line]
    """The same line with one fact changed, so that it does not hold."""
    captions: list[str]
    """What the web wrote: the true prompt, or for WRONG_SHARE of the images the wrong one."""


def draw_examples(count: int, *, seed: int) -> Examples:
    """`count` images with their lines, drawn from a seed."""
    rng = np.random.default_rng(seed)
    true_lines = [draw_line(rng) for _ in range(count)]
    wrong_lines = [with_one_fact_wrong(line, rng) for line in true_lines]
    scenes = [sample_scene(line, rng) for line in true_lines]
    is_wrong = rng.random(count) < WRONG_SHARE
    pairs = zip(true_lines, wrong_lines, is_wrong, strict=True)
    captions = [wrong["prompt"] if flip else line["prompt"] for line, wrong, flip in pairs]
    return Examples(
        images=np.stack([render(scene) for scene in scenes]),
        scenes=scenes,
        true_lines=true_lines,
        wrong_lines=wrong_lines,
        captions=captions,
    )
