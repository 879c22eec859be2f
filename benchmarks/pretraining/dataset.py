"""The pretraining set: images with web-like captions, a quarter of which state one wrong fact.

`draw_examples(count, seed=…)` makes the set from its seed; nothing is stored.
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
    """Images with their lines and captions; made by `draw_examples`, read by every training stage."""

    images: UInt8[np.ndarray, "B H W 3"]
    """uint8 images."""
    scenes: list[Scene]
    """The scene that each image shows."""
    true_lines: list[Line]
    """The metadata line that each image satisfies."""
    wrong_lines: list[Line]
    """The same lines with one fact changed, so that the images do not satisfy them."""
    captions: list[str]
    """The web captions: the true prompt, or for WRONG_SHARE of the images the wrong one."""


def draw_examples(count: int, *, seed: int) -> Examples:
    """Draw `count` images with their lines and captions from a seed."""
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
