"""The detector reads true scenes right and calls nothing an object that is not one."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny

from benchmarks.pretraining import check
from benchmarks.pretraining.autoencoder import reconstruct
from benchmarks.pretraining.dataset import Examples, draw_examples
from benchmarks.pretraining.export import TOYWORLD
from tests.support.worlds.shapes import one_shape
from toyworld.world.detector import ShapeDetector
from toyworld.world.scenes import Scene, Shape, render
from toyworld.world.vocabulary import COLOURS, GROUND, PALETTE, SHAPES, TAGS

MODEL = TOYWORLD / "model"


@pytest.fixture(scope="module")
def examples() -> Examples:
    """600 scenes of a seed that pretraining does not use."""
    return draw_examples(600, seed=1234)


def test_true_renders_are_read_right_in_98_percent_of_scenes_of_every_kind(examples: Examples) -> None:
    accuracy = check.detector_accuracy(examples, examples.images)
    assert set(accuracy) == set(TAGS)
    assert min(accuracy.values()) >= 0.98


def test_autoencoded_renders_are_read_right_in_95_percent_of_scenes_of_every_kind(examples: Examples) -> None:
    torch.set_num_threads(1)
    vae = AutoencoderTiny.from_pretrained(MODEL / "vae").float()
    accuracy = check.detector_accuracy(examples, reconstruct(vae, examples.images))
    assert min(accuracy.values()) >= 0.95


@pytest.mark.parametrize("label", SHAPES)
def test_each_shape_in_each_colour_is_named_and_boxed_to_half_a_pixel(label: str) -> None:
    for color in COLOURS:
        scene = one_shape(label, color, x=14.3, y=17.8)
        (found,) = ShapeDetector().detect(render(scene)[None])[0]
        assert (found.label, found.color) == (label, color)
        assert np.abs(np.subtract(found.box, scene.shapes[0].box)).max() < 0.5
        assert 0.9 < found.score <= 1.0


@pytest.mark.parametrize("label", SHAPES)
def test_half_a_shape_is_not_that_shape(label: str) -> None:
    for color in COLOURS:
        image = render(one_shape(label, color))
        image[:, 16:] = GROUND
        assert label not in [found.label for found in ShapeDetector().detect(image[None])[0]], color


def test_half_a_circle_and_half_a_square_are_no_objects() -> None:
    for label in ("circle", "square"):
        image = render(one_shape(label, "red"))
        image[:, 16:] = GROUND
        assert ShapeDetector().detect(image[None]) == [[]]


def test_smears_and_stripes_are_no_objects() -> None:
    smear = np.full((32, 32, 3), GROUND, np.uint8)
    ramp = np.exp(-((np.arange(32) - 16) ** 2) / 60.0)[None, :, None] * np.ones((32, 1, 1))
    smear = (smear + ramp * (np.array(PALETTE["green"]) - smear)).astype(np.uint8)
    stripe = np.full((32, 32, 3), GROUND, np.uint8)
    stripe[10:15, 3:29] = PALETTE["blue"]
    empty = np.full((32, 32, 3), GROUND, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    assert ShapeDetector().detect(np.stack([smear, stripe, empty, noise])) == [[], [], [], []]


def test_a_pale_shape_has_no_colour_name() -> None:
    image = render(one_shape("circle", "red")).astype(float)
    pale = (0.5 * image + 0.5 * np.array(GROUND)).astype(np.uint8)
    assert all(found.color is None for found in ShapeDetector().detect(pale[None])[0])


def test_a_mixed_colour_has_no_name() -> None:
    brown = Shape(label="circle", color="red", rgb=(130, 105, 58), center=(16.0, 16.0), radius=5.5)
    assert all(found.color is None for found in ShapeDetector().detect(render(Scene(shapes=(brown,)))[None])[0])


def test_two_touching_shapes_of_one_colour_are_not_one_object() -> None:
    left = one_shape("circle", "blue", x=10.5).shapes
    right = one_shape("circle", "blue", x=21.0).shapes
    assert ShapeDetector().detect(render(Scene(shapes=left + right))[None]) == [[]]


@pytest.mark.parametrize(
    ("images", "rule"),
    [
        (np.zeros((1, 32, 32, 3), np.float32), "uint8 array, got float32"),
        (np.zeros((32, 32, 3), np.uint8), r"\[B, H, W, 3\], got \[32, 32, 3\]"),
        (np.zeros((1, 3, 32, 32), np.uint8), r"got \[1, 3, 32, 32\]"),
        ([[0]], "got list"),
    ],
)
def test_wrong_input_is_refused_with_rule_and_value(images: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        ShapeDetector().detect(images)  # type: ignore[arg-type]
