"""The benchmarks' own scorers."""

import numpy as np
import pytest

from benchmarks.scorers import GradedGenEval, Redness
from tests.support.worlds.shapes import one_shape
from toyworld.world.scenes import render
from toyworld.world.vocabulary import GROUND


def test_redness_is_red_minus_the_rest() -> None:
    images = np.zeros((3, 2, 2, 3), np.uint8)
    images[0, ..., 0] = 255
    images[1, ..., 1:] = 255
    scores = Redness().score(images, ["a"] * 3, [{}] * 3)
    assert scores.values.tolist() == [1.0, -1.0, 0.0]
    assert scores.valid.all()


def test_graded_geneval_fades_with_the_shape_where_the_verdict_falls_at_once() -> None:
    images = np.stack([render(one_shape("circle", "red", radius=6.0))] * 4)
    for cut, image in enumerate(images):
        image[:, 22 - 2 * cut :] = GROUND  # Overlaps 1.00, 0.87, 0.75, 0.65 with a circle.
    line = {"tag": "single_object", "include": [{"class": "circle", "count": 1}], "prompt": "a circle"}
    scores = GradedGenEval().score(images, ["a circle"] * 4, [line] * 4)
    assert scores.values.tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert scores.components["strict"].tolist() == [1, 1, 0, 0]
