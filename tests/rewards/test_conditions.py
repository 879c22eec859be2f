"""A scorer may look at the condition images of the prompts, and finds out by its own signature."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protocol.errors import ContractError, PromptError
from protocol.ground.condition_images import condition_of
from protocol.messages import ConditionImage, Prompt, Scores
from rewards import scorer as scorer_module
from rewards.scorer import build_scorer, check_prompts, score_prompts
from rewards.scores import scored

IMAGES = np.stack([np.full((2, 2, 3), level, np.uint8) for level in (10, 20, 40)])


class Kept:
    """How much an image is brighter than the first condition image; it must have one."""

    name, low, high = "kept", -255.0, 255.0

    @staticmethod
    def check(prompts):
        """Take every prompt."""

    def score(self, images, prompts, metadata, conditions) -> Scores:
        return scored([float(image.mean()) - row[0].mean() for image, row in zip(images, conditions, strict=True)])


class Counted(Kept):
    """The number of condition images, which may be none."""

    def score(self, images, prompts, metadata, conditions=()) -> Scores:
        return scored([len(row) for row in conditions])


class Blind(Kept):
    def score(self, images, prompts, metadata) -> Scores:
        return scored(images.mean((1, 2, 3)))


@pytest.fixture
def condition(tmp_path: Path):
    def make(level: int) -> ConditionImage:
        path = tmp_path / f"{level}.png"
        Image.fromarray(np.full((3, 5, 3), level, np.uint8)).save(path)
        return condition_of(path)

    return make


def prompts_of(*conditions: tuple[ConditionImage, ...]) -> list[Prompt]:
    return [Prompt(index=row, text="a", conditions=each) for row, each in enumerate(conditions)]


def test_a_scorer_gets_what_its_signature_asks_for(condition, monkeypatch: pytest.MonkeyPatch) -> None:
    dark, light = condition(5), condition(30)
    read = []
    monkeypatch.setattr(
        scorer_module, "read_condition", lambda each, real=scorer_module.read_condition: read.append(each) or real(each)
    )
    prompts = prompts_of((dark,), (dark, light), (light,))
    values = {kind: score_prompts(build_scorer(f"{__name__}:{kind}"), IMAGES, prompts).values for kind in KINDS}
    assert {kind: each.tolist() for kind, each in values.items()} == KINDS
    assert len(read) == 4, "each file once for each scorer that looks at it"


KINDS = {"Kept": [5, 15, 10], "Counted": [1, 2, 1], "Blind": [10, 20, 40]}


def test_only_a_scorer_that_needs_conditions_refuses_prompts_without_them(condition) -> None:
    prompts = prompts_of((condition(5),), (), (condition(5),))
    for kind in ("Counted", "Blind"):
        check_prompts(f"{__name__}:{kind}", {}, prompts)
    for check in (lambda: check_prompts(f"{__name__}:Kept", {}, prompts), lambda: build_scorer(WHERE).check(prompts)):
        with pytest.raises(PromptError, match=r"prompt line 2 .*needs an image to compare with, got none: add `image`"):
            check()


WHERE = f"{__name__}:Kept"


def test_a_condition_that_cannot_be_read_costs_only_its_images_their_score(condition) -> None:
    gone, there = condition(5), condition(7)
    Path(gone.path).unlink()
    scores = score_prompts(build_scorer(WHERE), IMAGES, prompts_of((there,), (gone,), ()))
    assert scores.valid.tolist() == [True, False, False] and scores.values[0] == 3
    assert "5.png cannot be read" in scores.reasons[1]
    assert "without a condition image" in scores.reasons[2]


def test_condition_images_can_be_given_as_pixels_and_must_be_one_list_for_each_image() -> None:
    rows = [[np.full((2, 2, 3), level, np.uint8)] for level in (1, 2, 3)]
    scorer = build_scorer(WHERE)
    assert scorer.score(IMAGES, [""] * 3, [{}] * 3, rows).values.tolist() == [9, 18, 37]
    with pytest.raises(ContractError, match="conditions must hold one entry for each of 3 images, got 2"):
        scorer.score(IMAGES, [""] * 3, [{}] * 3, rows[:2])


def test_a_function_gets_them_by_name_and_they_are_no_argument_of_the_config(
    condition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def kept(images, prompts, metadata, gain=1.0, conditions=None):\n"
        "    return [gain * len(row) if row else None for row in conditions]\n"
        "def brighter(images, prompts, metadata, conditions):\n"
        "    return [image.mean() - row[0].mean() for image, row in zip(images, conditions)]\n"
    )
    prompts = prompts_of((condition(5),), (), (condition(7),))
    check_prompts("./mine.py:kept", {"gain": 3}, prompts)
    scores = score_prompts(build_scorer("./mine.py:kept", gain=3), IMAGES, prompts)
    np.testing.assert_array_equal(scores.values, [3, np.nan, 3])
    with pytest.raises(PromptError, match="prompt line 2"):
        check_prompts("./mine.py:brighter", {}, prompts)
    assert score_prompts(build_scorer("./mine.py:brighter"), IMAGES[::2], prompts[::2]).values.tolist() == [5, 33]
