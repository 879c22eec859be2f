"""The GenEval scorer through its door, with a detector whose finds are chosen by the images' first pixel."""

import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from protocol.errors import ContractError, PromptError, ScorerError
from protocol.messages import Detection, Prompt
from rewards.scorer import build_scorer
from tests.support.paths import ROOT
from toyworld.world.captions import draw_line
from toyworld.world.scenes import render, sample_scene
from toyworld.world.vocabulary import TAGS

CIRCLE = Detection(label="circle", color="red", box=(0, 0, 10, 10), score=0.9)
SQUARE = Detection(label="square", color="blue", box=(20, 0, 30, 10), score=0.9)
LINE = {"tag": "two_object", "include": [{"class": "circle", "count": 1}, {"class": "square", "count": 1}]}


class PixelDetector:
    """Finds as many of (circle, square) as the first pixel's red value says."""

    def detect(self, images: np.ndarray, colored: Any) -> list[list[Detection]]:
        return [[CIRCLE, SQUARE][: image[0, 0, 0]] for image in images]


class BlindDetector:
    """Cannot look."""

    def detect(self, images: np.ndarray, colored: Any) -> list[list[Detection]]:
        raise RuntimeError("no\n  memory")


class ForgetfulDetector:
    """Forgets the last image."""

    def detect(self, images: np.ndarray, colored: Any) -> list[list[Detection]]:
        return [[] for _ in images[1:]]


class InsideOutDetector:
    """Gives boxes with their corners exchanged."""

    def detect(self, images: np.ndarray, colored: Any) -> list[list[Detection]]:
        return [[Detection(label="circle", color=None, box=(9, 0, 1, 5), score=1.0)] for _ in images]


def images(*first_pixels: int) -> np.ndarray:
    images = np.zeros((len(first_pixels), 4, 4, 3), np.uint8)
    images[:, 0, 0, 0] = first_pixels
    return images


def ask(detector: str, images: np.ndarray, **args: Any) -> Any:
    scorer = build_scorer("geneval", detector=f"{__name__}:{detector}", **args)
    return scorer.score(images, ["a circle and a square"] * len(images), [LINE] * len(images))


def test_soft_scores_come_with_both_verdicts_and_nothing_else() -> None:
    scores = ask("PixelDetector", images(0, 1, 2))
    assert scores.values.tolist() == [0.0, 0.5, 1.0]
    assert scores.valid.all() and scores.reasons == ("", "", "")
    assert {name: part.tolist() for name, part in scores.components.items()} == {
        "strict": [0.0, 0.0, 1.0],
        "correct": [0.0, 0.0, 1.0],
    }


def test_an_image_without_shapes_is_a_valid_zero() -> None:
    scores = ask("PixelDetector", images(0))
    assert scores.values.tolist() == [0.0] and scores.valid.tolist() == [True]


def test_strict_reward_is_the_strict_verdict() -> None:
    assert ask("PixelDetector", images(1, 2), reward="strict").values.tolist() == [0.0, 1.0]


def test_a_failing_detector_makes_scores_missing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scores = ask("BlindDetector", images(1, 2))
    assert np.isnan(scores.values).all() and not scores.valid.any()
    assert scores.reasons == ("geneval: RuntimeError: no memory",) * 2
    assert [record.name for record in caplog.records] == ["rewards.scorer"]


def test_a_detector_that_forgets_an_image_breaks_the_contract() -> None:
    with pytest.raises(
        ContractError, match=r"scorer geneval: the detector must return one list for each of 2 images, got 1"
    ):
        ask("ForgetfulDetector", images(1, 2))


def test_a_box_with_exchanged_corners_breaks_the_contract() -> None:
    with pytest.raises(ContractError, match=r"scorer geneval: box and score must be .*\(9, 0, 1, 5\)"):
        ask("InsideOutDetector", images(1))


def test_check_names_the_line_that_cannot_be_scored() -> None:
    scorer = build_scorer("geneval", detector=f"{__name__}:PixelDetector")
    good = Prompt(index=0, text="a circle and a square", metadata=LINE)
    scorer.check([good])
    with pytest.raises(PromptError, match=r"prompt line 8 \('a poem'\): GenEval metadata must hold"):
        scorer.check([good, Prompt(index=7, text="a poem")])


def test_another_reward_is_refused() -> None:
    with pytest.raises(ScorerError, match="reward of geneval must be 'soft' or 'strict', got 'sfot'"):
        build_scorer("geneval", detector=f"{__name__}:PixelDetector", reward="sfot")


def test_a_class_that_cannot_detect_is_refused() -> None:
    with pytest.raises(ScorerError, match="must have a method detect"):
        build_scorer("geneval", detector="pathlib:PurePath")


def test_drawn_scenes_are_strictly_right_for_the_toy_detector() -> None:
    rng = np.random.default_rng(0)
    lines = [draw_line(rng, tag) for tag in TAGS for _ in range(4)]
    images = np.stack([render(sample_scene(line, rng)) for line in lines])
    scorer = build_scorer("geneval", detector="toyworld.world.detector:ShapeDetector")
    scores = scorer.score(images, [line["prompt"] for line in lines], lines)
    assert scores.values.tolist() == [1.0] * len(lines)
    assert scores.components["strict"].tolist() == [1.0] * len(lines)


def test_importing_rewards_loads_neither_torch_nor_ray_nor_a_detector() -> None:
    program = (
        "import sys, rewards.scorer, rewards.geneval.scorer;"
        "print(sorted({'torch', 'ray', 'diffusers', 'toyworld', 'scipy', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
