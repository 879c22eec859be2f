"""A bad image costs itself, whatever else is in its batch."""

import numpy as np
import pytest

from protocol.errors import ContractError
from protocol.messages import Scores
from rewards.scorer import CheckedScorer
from rewards.scores import scored


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
        if bad := sorted(set(levels.tolist()) & set(self.bad)):
            raise ValueError(f"cannot look at {bad[0]}")
        assert [str(level) for level in levels] == list(prompts), "prompts stay with their images"
        return scored(levels)


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
    assert scores.reasons[bad].startswith(f"fussy: ValueError: cannot look at {bad} (test_isolation.py, line ")
    assert sorted(scorer.calls, reverse=True) == [16, 8, 8, 4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("bad", [(0, 15), (2, 3, 9), tuple(range(15)), tuple(range(16))], ids=str)
def test_several_bad_images_are_missing_in_any_batch(bad: tuple[int, ...]) -> None:
    scorer = Fussy(*bad)
    scores = ask(scorer)
    assert scores.valid.tolist() == [index not in bad for index in range(16)]
    assert all(scores.reasons[index].startswith(f"fussy: ValueError: cannot look at {index} (") for index in bad)
    assert len(scorer.calls) <= 2 * 16 - 1


def test_a_group_that_a_scorer_sees_whole_is_never_divided() -> None:
    scorer = Fussy(3)
    scorer.sees = "group"
    assert not ask(scorer).valid.any() and scorer.calls == [16]


def test_a_sound_batch_is_scored_once() -> None:
    scorer = Fussy()
    assert ask(scorer).valid.all() and scorer.calls == [16]


def test_a_broken_contract_is_no_failure_to_work_around() -> None:
    class Wide(Fussy):
        def score(self, images, prompts, metadata) -> Scores:
            return scored([999.0] * len(images))

    with pytest.raises(ContractError, match=r"scorer fussy: values must lie in \[0.0, 255.0\]"):
        ask(Wide())
