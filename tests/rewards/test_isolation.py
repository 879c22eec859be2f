"""One bad image costs itself; a broken scorer costs three calls."""

import numpy as np
import pytest

from protocol.errors import ContractError
from protocol.messages import Scores
from rewards.scorer import CheckedScorer
from rewards.scores import judged


class Fussy:
    """The first pixel is the score; raises when `bad` images are in the batch."""

    name = "fussy"
    low = 0.0
    high = 255.0

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.calls: list[int] = []

    def check(self, prompts) -> None:
        """Any prompt will do."""

    def score(self, images, prompts, metadata) -> Scores:
        self.calls.append(len(images))
        levels = images[:, 0, 0, 0]
        if set(levels.tolist()) & set(self.bad):
            raise ValueError("cannot look at this")
        assert [str(level) for level in levels] == list(prompts), "prompts stay with their images"
        return judged(levels)


def ask(scorer: Fussy, count: int = 16) -> Scores:
    images = np.zeros((count, 2, 2, 3), np.uint8)
    images[:, 0, 0, 0] = range(count)
    return CheckedScorer(scorer).score(images, [str(i) for i in range(count)], [{}] * count)


@pytest.mark.parametrize("bad", range(16))
def test_one_bad_image_is_missing_alone(bad: int) -> None:
    scorer = Fussy(bad)
    scores = ask(scorer)
    assert scores.valid.tolist() == [index != bad for index in range(16)]
    assert scores.values[scores.valid].tolist() == [float(i) for i in range(16) if i != bad]
    assert scores.reasons[bad] == "fussy: ValueError: cannot look at this"
    assert scorer.calls == [16, 8, 8, 4, 4, 2, 2, 1, 1]


def test_a_broken_scorer_is_asked_three_times_and_no_more() -> None:
    scorer = Fussy(*range(16))
    assert not ask(scorer).valid.any()
    assert scorer.calls == [16, 8, 8]


def test_a_sound_batch_is_scored_once() -> None:
    scorer = Fussy()
    assert ask(scorer).valid.all() and scorer.calls == [16]


def test_a_broken_contract_is_no_failure_to_work_around() -> None:
    class Wide(Fussy):
        def score(self, images, prompts, metadata) -> Scores:
            return judged([999.0] * len(images))

    with pytest.raises(ContractError, match=r"scorer fussy: values must lie in \[0.0, 255.0\]"):
        ask(Wide())
