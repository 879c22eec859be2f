"""A scorer that fails says so: the first reason and the count are one condition."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from protocol.errors import ScorerError
from protocol.messages import Metadata, Prompt, Scores
from rewards.scorer import build_scorer
from rewards.scores import HEALED, Tally, partly
from tests.support.runs.sinks import Said

IMAGES = np.zeros((2, 4, 4, 3), np.uint8)
WHERE = r" \(test_missing\.py, line \d+\)"
"""Ends the reason of what `Failing` raises."""


class Failing:
    """Raises what its arguments say, when it is built or when it scores."""

    name, low, high = "failing", 0.0, 1.0

    def __init__(self, *, when: str, error: type[BaseException] = RuntimeError) -> None:
        self.error = error
        if when == "built":
            raise error("no such GPU\nin this machine")

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Any will do."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        raise self.error("out of ideas")


def test_the_first_reason_and_the_count_are_told_until_scores_are_complete_again() -> None:
    said, kind = Said(), "ScoresComplete/mine"
    tally = Tally("mine", said)
    good: dict[str, Any] = {"values": [0.5] * HEALED, "reasons": [""] * HEALED}
    tally.add(partly(**good))
    assert said.conditions == []
    tally.add(partly([0.0, 0.5], ["mine: RuntimeError: out of ideas", ""]))
    tally.add(partly([0.0, 0.0], ["another", "another"]))
    tally.add(partly([0.5], [""]))
    assert [(each.type, each.holds) for each in said.conditions] == [(kind, False)] * 2
    for each, count in zip(said.conditions, ("1 of 502", "3 of 504"), strict=True):
        assert count in each.message and each.message.endswith("out of ideas")
    tally.add(partly(**good))
    last = said.conditions[2]
    assert (last.type, last.holds) == (kind, True) and "scores again; 3 images had no score" in last.message


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_scorer_that_raises_or_exits_gives_missing_scores_with_the_reason(error: type[BaseException]) -> None:
    scores = build_scorer(f"{__name__}:Failing", when="scoring", error=error).score(IMAGES, ["", ""], [{}, {}])
    assert not scores.valid.any()
    (reason,) = set(scores.reasons)
    assert re.fullmatch(f"failing: {error.__name__}: out of ideas{WHERE}", reason)


def test_a_constructor_that_raises_is_one_line() -> None:
    with pytest.raises(
        ScorerError,
        match=f"cannot be built with .*: RuntimeError: no such GPU in this machine{WHERE}$",
    ):
        build_scorer(f"{__name__}:Failing", when="built")


class Wordless(Exception):
    """It fails to give its message."""

    def __str__(self) -> str:
        raise self


def test_an_exception_without_a_message_that_can_be_shown_is_named_by_its_class() -> None:
    scores = build_scorer(f"{__name__}:Failing", when="scoring", error=Wordless).score(IMAGES, ["", ""], [{}, {}])
    (reason,) = set(scores.reasons)
    assert re.fullmatch(f"failing: Wordless{WHERE}", reason)
    with pytest.raises(ScorerError, match=f"cannot be built with the arguments .*: Wordless{WHERE}$"):
        build_scorer(f"{__name__}:Failing", when="built", error=Wordless)
