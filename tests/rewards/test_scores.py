"""Answers of several scorers as one, and pieces of requests scored together."""

from dataclasses import replace

import numpy as np
import pytest

from protocol.config.reward import RewardConfig
from protocol.errors import ContractError, RewardError
from protocol.messages import Metadata, Prompt, Scores
from rewards.scorer import CheckedScorer, Piece, score_pieces
from rewards.scores import joined, mix, mix_observed, partly, patched, scored, settle, split

NAN = float("nan")


class SizeAndPixel:
    """First pixel plus a hundredth of the image's width; notes how many images each call held."""

    name = "size_and_pixel"
    low = 0.0
    high = 300.0

    def __init__(self) -> None:
        self.calls: list[int] = []

    def check(self, prompts) -> None:
        """Any prompt will do."""

    def score(self, images: np.ndarray, prompts, metadata: list[Metadata]) -> Scores:
        self.calls.append(len(images))
        reasons = [str(line.get("fails", "")) for line in metadata]
        return partly(images[:, 0, 0, 0] + images.shape[2] / 100, reasons, {"words": [len(text) for text in prompts]})


def pixels(*levels: int, width: int = 4) -> np.ndarray:
    images = np.zeros((len(levels), 2, width, 3), np.uint8)
    images[:, 0, 0, 0] = levels
    return images


def piece(*rows: int, text: str = "a", **metadata) -> Piece:
    return replace(Piece.of([Prompt(index=0, text=text, metadata=metadata)] * len(rows)), rows=rows)


def test_the_paper_s_text_recipe_is_a_weighted_sum_with_each_part_beside_it() -> None:
    mixed = mix({"ocr": scored([1.0, 0.5]), "pick": scored([0.8, 0.9], {"raw": [20, 22]})}, {"ocr": 0.8, "pick": 0.2})
    np.testing.assert_allclose(mixed.values, [0.96, 0.58], rtol=1e-6)
    np.testing.assert_allclose(mixed.components["ocr"], [1.0, 0.5])
    assert mixed.components["pick/raw"].tolist() == [20, 22]


def test_a_missing_part_makes_the_mixture_missing_with_all_reasons() -> None:
    mixed = mix({"a": partly([NAN, 1], ["down", ""]), "b": partly([NAN, 1], ["late", ""])}, {"a": 1, "b": 1})
    assert mixed.valid.tolist() == [False, True]
    assert mixed.reasons == ("down; late", "")


def test_what_is_only_observed_neither_adds_nor_takes_away() -> None:
    other = partly([0.5, NAN], ["", "lost"], {"x": [3, 4]})
    shown = mix_observed({"b": other, "a": scored([1.0, 2.0])}, {"a": 1.0})
    assert shown.values.tolist() == [1, 2] and shown.valid.all() and shown.reasons == ("", "")
    np.testing.assert_array_equal(shown.components["b"], np.array([0.5, NAN], np.float32))
    np.testing.assert_array_equal(shown.components["b/x"], np.array([3, NAN], np.float32))
    with pytest.raises(ContractError, match="must have one length"):
        mix_observed({"a": scored([1.0, 2.0]), "b": scored([1.0])}, {"a": 1.0})


def test_pieces_of_one_size_share_a_call_and_answers_keep_the_pieces_order() -> None:
    scorer = SizeAndPixel()
    answer = score_pieces(
        CheckedScorer(scorer),
        [piece(2, 0), piece(0, text="four", fails="blurred"), piece(1)],
        [pixels(10, 11, 12), pixels(20, width=8), pixels(30, 31)],
    )
    assert scorer.calls == [3, 1]
    np.testing.assert_allclose(answer.values, [12.04, 10.04, NAN, 31.04], rtol=1e-6)
    assert answer.reasons == ("", "", "blurred", "")
    assert answer.components["words"].tolist()[:2] == [1, 1] and np.isnan(answer.components["words"][2])


def test_images_judged_anew_take_their_rows() -> None:
    old = partly([1, NAN, NAN, 4], ["", "x", "y", ""], {"c": [1, 1, 1, 1]})
    new = patched(old, [1, 2], partly([2, NAN], ["", "again y"], {"c": [5, 5]}))
    np.testing.assert_array_equal(new.values, np.array([1, 2, NAN, 4], np.float32))
    assert new.reasons == ("", "", "again y", "")
    np.testing.assert_array_equal(new.components["c"], np.array([1, 5, NAN, 1], np.float32))


def test_each_failure_policy_leaves_what_it_says_and_never_a_zero() -> None:
    scores = partly([1.0, NAN], ["", "no answer"])
    kept = {name: RewardConfig(scorer="x", on_failure=name) for name in ("missing", "drop_group", "pause", "fail")}
    assert settle("r", kept["fail"], scored([1.0])).valid.all()
    for name, is_void in (("missing", False), ("drop_group", True), ("pause", False)):
        settled = settle("r", kept[name], scores)
        assert np.isnan(settled.values[1]) and settled.voids_group is is_void
        assert mix({"r": settled}, {"r": 1.0}).voids_group is is_void
    with pytest.raises(RewardError, match="reward r has no score for 1 of 2 images after 3 tries: no answer; fix"):
        settle("r", kept["fail"], scores)


def test_seconds_go_with_the_images_and_stay_whole() -> None:
    both = replace(scored([1.0, 2.0, 3.0, 4.0]), seconds=8.0)
    first, rest = split(both, [1, 3])
    assert (first.seconds, rest.seconds, joined([first, rest]).seconds) == (2.0, 6.0, 8.0)
    again = replace(scored([5.0]), seconds=1.5)
    assert patched(both, (2,), again).seconds == 9.5
    assert mix({"a": both, "b": replace(both, seconds=1.0)}, {"a": 1.0, "b": 1.0}).seconds == 9.0
