"""Paired bootstrap intervals, against numbers worked by hand and against scipy."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from deploy.folder.heldout import HeldoutScores, heldout_of
from deploy.folder.paired import change_text, group_difference, paired_difference, score_of, why_unpaired
from protocol.config.run import EvaluationConfig
from tests.support.runs.ended import an_evaluation


def held(scores: np.ndarray) -> HeldoutScores:
    return heldout_of(1, an_evaluation(scores.tolist()), EvaluationConfig())


def test_equal_gains_leave_no_doubt():
    scores = np.linspace(0.2, 0.7, 12).reshape(6, 2)
    found = paired_difference([held(scores)], [held(scores + 0.1)])
    assert found is not None
    assert found.value == pytest.approx(0.1, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.1, 0.1), abs=1e-6)
    assert found.is_clear
    assert found.prompts == 6


def test_the_score_is_the_mean_over_kinds_of_the_mean_over_images():
    before = np.array([[0, 0], [0, 0], [0, 0], [0, 1], [1, 1], [0, 1]], float)
    after = before.copy()
    after[4] = [np.nan, 0]
    found = paired_difference([held(before)], [held(after)])
    assert found is not None
    first, second = (1 / 8 + 3 / 4) / 2, (1 / 8 + 1 / 3) / 2
    assert found.value == pytest.approx(second - first), "an image without a score is left out"


def test_the_interval_is_that_of_scipy():
    rng = np.random.default_rng(4)
    before, after = rng.random((6, 1)), rng.random((6, 1))
    found = paired_difference([held(before)], [held(after)], tag="colors")
    known = bootstrap(((after - before)[:4, 0],), np.mean, n_resamples=20_000, method="percentile", rng=1)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval), abs=0.02)


def test_images_of_other_sizes_are_not_paired():
    small = held(np.full((6, 2), 0.5))
    large = small.model_copy(update={"height": 1024, "width": 1024})
    unsaid = small.model_copy(update={"height": None, "width": None})
    assert small.height
    assert why_unpaired(small, large) == "the evaluations have images of different sizes"
    assert why_unpaired(small, small) is why_unpaired(unsaid, large) is None


def test_equal_scores_give_the_same_interval():
    rng = np.random.default_rng(4)
    before, after = held(rng.random((6, 2))), held(rng.random((6, 2)))
    assert paired_difference([before], [after]) == paired_difference([before], [after])


def test_a_kind_without_a_score_has_no_difference():
    scores = np.full((6, 2), 0.5)
    dark = scores.copy()
    dark[4:] = np.nan
    empty = held(scores).model_copy(update={"scores": {"score": dark.tolist()}})
    assert paired_difference([held(scores)], [empty]) is None
    assert paired_difference([held(scores)], [empty], tag="colors") is not None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 9}, "the evaluations differ in their seed"),
        ({"steps": 99}, "the evaluations differ in their steps"),
        ({"prompts": ["x"] * 6}, "the evaluations differ in their prompts"),
        ({"scores": {"score": [[0.1]] * 6}}, "the evaluations have different numbers of images per prompt"),
    ],
)
def test_evaluations_that_do_not_fit_are_not_paired(change, why):
    one = held(np.full((6, 2), 0.5))
    assert why_unpaired(one, one.model_copy(update=change)) == why
    assert why_unpaired(one, one.model_copy()) is None


def test_groups_of_seeds_have_the_interval_of_student_over_seeds_and_prompts():
    """Runs that score 0.4, 0.5, 0.6 and 0.7, 0.8, 0.9 on every prompt: prompts add nothing, s^2 is 0.01."""
    first, second = (
        [held(np.full((6, 2), score)) for score in scores] for scores in ((0.4, 0.5, 0.6), (0.7, 0.8, 0.9))
    )
    found = group_difference(first, second)
    assert found is not None
    half = 2.7764 * np.sqrt(0.01 * (1 / 3 + 1 / 3))
    assert (found.value, found.low, found.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-4)
    assert found.has_seeds
    assert found.is_clear


def test_one_run_in_each_group_has_the_interval_over_prompts_alone():
    rng = np.random.default_rng(4)
    before, after = held(rng.random((6, 2))), held(rng.random((6, 2)))
    found = group_difference([before], [after])
    assert found == paired_difference([before], [after])
    assert not found.has_seeds


def test_prompts_widen_the_interval_of_seeds():
    rng = np.random.default_rng(5)
    level = [held(np.full((6, 2), score)) for score in (0.4, 0.5)]
    rough = [held(np.clip(0.7 + 0.3 * rng.standard_normal((6, 2)), 0, 1)) for _ in range(2)]
    smooth = [held(np.full((6, 2), score_of(each))) for each in rough]
    wide, narrow = group_difference(level, rough), group_difference(level, smooth)
    assert wide.value == pytest.approx(narrow.value)
    assert wide.high - wide.low > narrow.high - narrow.low


def test_a_reading_that_fell_is_said_to_fall_unless_chance_explains_it():
    scores = np.full((6, 2), 0.5)
    diversity = np.array([[0.4], [0.5], [0.4], [0.5], [0.4], [0.5]]).repeat(2, 1)

    def measured(values: np.ndarray):
        return held(scores).model_copy(update={"scores": {"score": scores.tolist(), "diversity": values.tolist()}})

    assert change_text(measured(diversity), measured(diversity - 0.2), "diversity") == "diversity falls: 0.450 → 0.250"
    mixed = diversity + 0.1 * np.array([[1], [-1], [-1], [1], [1], [-1.1]])
    assert change_text(measured(diversity), measured(mixed), "diversity").startswith("diversity 0.450 → ")
    assert change_text(held(scores), held(scores), "diversity") == ""
