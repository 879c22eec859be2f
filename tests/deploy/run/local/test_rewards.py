"""Rewards in one process: held-out scorers only evaluate, and failure policies hold there too."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deploy.run.local import LocalFleet
from protocol.errors import PromptError, RewardError
from protocol.ground.condition_images import condition_of
from protocol.messages import Metadata, Prompt, Scores
from protocol.sink import StatusSink
from rewards.scores import partly
from tests.support.runs.sinks import Told

IMAGES = np.stack([np.full((4, 4, 3), level, np.uint8) for level in (10, 20, 30)])


class Level:
    """The first pixel; images of level `lacking` have no score."""

    name = "level"
    low = 0.0
    high = 255.0

    def __init__(self, *, lacking: int = -1) -> None:
        self._lacking = lacking

    def check(self, prompts: Sequence[Prompt]) -> None:
        if any(prompt.text == "hated" for prompt in prompts):
            raise PromptError("prompt line 1: hated")

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        levels = images[:, 0, 0, 0]
        return partly(levels, ["lost" if level == self._lacking else "" for level in levels])


def fleet_of(tiny_config: Any, sink: StatusSink | None = None, **rewards: dict[str, Any]) -> LocalFleet:
    held = {name: {"scorer": f"{__name__}:Level"} | reward for name, reward in rewards.items()}
    return LocalFleet(tiny_config(rewards=held, evaluation={"component": "reward"}), sink)


def asked(fleet: LocalFleet, method: str) -> Scores:
    async def scenario() -> Scores:
        await fleet.start()
        try:
            return await getattr(fleet, method)(IMAGES, [Prompt(index=0, text="p")] * 3)
        finally:
            fleet.stop()

    return asyncio.run(scenario())


def test_a_scorer_that_evaluates_is_asked_at_evaluations_only(tiny_config: Any) -> None:
    rewards = {"a": {"weight": 2.0}, "watched": {"use": "evaluate", "args": {"lacking": 20}}}
    trained = asked(fleet_of(tiny_config, **rewards), "score_for_training")
    assert trained.values.tolist() == [20, 40, 60] and set(trained.components) == {"a"}
    shown = asked(fleet_of(tiny_config, **rewards), "score_for_evaluation")
    assert shown.values.tolist() == [20, 40, 60] and shown.valid.all()
    np.testing.assert_array_equal(shown.components["watched"], np.array([10, np.nan, 30], np.float32))


def test_missing_scores_are_told_with_their_first_reason(tiny_config: Any) -> None:
    told = Told()
    asked(fleet_of(tiny_config, told, a={"args": {"lacking": 20}}), "score_for_training")
    assert told.messages == {"ScoresComplete/a": "reward a has no score for 1 of 3 images; the first: lost"}


def test_a_missing_score_ends_the_run_where_it_must_not_be_missing(tiny_config: Any) -> None:
    """A scorer is asked once here, whatever `tries` says."""
    with pytest.raises(RewardError, match="reward a has no score for 1 of 3 images after one try: lost"):
        asked(fleet_of(tiny_config, a={"on_failure": "fail", "args": {"lacking": 20}}), "score_for_training")


class Silent(Level):
    """No image has a score."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        return partly([0.0] * len(images), ["lost"] * len(images))


def test_a_pause_ends_the_run_if_no_image_has_a_score(tiny_config: Any) -> None:
    """As on Ray an image that fails while others succeed is missing."""
    scores = asked(fleet_of(tiny_config, a={"on_failure": "pause", "args": {"lacking": 20}}), "score_for_training")
    assert scores.valid.tolist() == [True, False, True] and not scores.voids_group
    silent = fleet_of(tiny_config, a={"on_failure": "pause", "scorer": f"{__name__}:Silent"})
    with pytest.raises(RewardError, match=r"no score for any of 3 images: lost; with --local nothing .* to missing"):
        asked(silent, "score_for_training")


def test_drop_group_marks_the_answer(tiny_config: Any) -> None:
    scores = asked(fleet_of(tiny_config, a={"on_failure": "drop_group", "args": {"lacking": 20}}), "score_for_training")
    assert scores.voids_group and scores.valid.tolist() == [True, False, True]


async def test_a_scorer_with_an_environment_of_its_own_checks_prompts_after_the_start(tiny_config: Any) -> None:
    fleet = fleet_of(tiny_config, a={"runtime_env": {"env_vars": {"A": "b"}}})
    await fleet.start()
    try:
        await fleet.check([Prompt(index=0, text="fine")])
        with pytest.raises(PromptError, match="hated"):
            await fleet.check([Prompt(index=0, text="hated")])
    finally:
        fleet.stop()


class Taker(Level):
    """Takes the tag out of the metadata that it gets, and scores whether there was one."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        return partly([float(each.pop("tag", 0)) for each in metadata], [""] * len(images))  # type: ignore[attr-defined]


async def test_what_a_scorer_changes_in_the_metadata_no_other_call_sees(tiny_config: Any) -> None:
    """On Ray each call gets a copy of its own, so a scorer that changes it must not have other scores here."""
    taker = {"scorer": f"{__name__}:Taker"}
    fleet = fleet_of(tiny_config, a=taker, b=taker)
    prompts = [Prompt(index=0, text="p", metadata={"tag": tag}) for tag in (1.0, 2.0, 3.0)]
    await fleet.start()
    try:
        for _ in range(2):
            scores = await fleet.score_for_training(IMAGES, prompts)  # type: ignore[arg-type]
            assert scores.values.tolist() == [2, 4, 6]
    finally:
        fleet.stop()
    assert prompts[0].metadata == {"tag": 1.0}


class Beside(Level):
    """The first pixel of the first condition image."""

    def score(self, images, prompts, metadata, conditions) -> Scores:
        return partly([row[0][0, 0, 0] for row in conditions], [""] * len(images))


async def test_condition_images_reach_a_scorer_in_this_process(tiny_config: Any, tmp_path: Path) -> None:
    fleet = fleet_of(tiny_config, a={"scorer": f"{__name__}:Beside"})
    Image.fromarray(np.full((2, 3, 3), 7, np.uint8)).save(tmp_path / "7.png")
    prompts = [Prompt(index=0, text="p", conditions=(condition_of(tmp_path / "7.png"),))] * 3
    await fleet.start()
    try:
        answer = await fleet.score_for_training(IMAGES, prompts)  # type: ignore[arg-type]
    finally:
        fleet.stop()
    assert answer.values.tolist() == [7, 7, 7]


class Rank(Level):
    """A group's scorer: how many of the others are darker."""

    sees = "group"

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        levels = images[:, 0, 0, 0]
        return partly((levels[:, None] > levels[None, :]).sum(1), [""] * len(levels))


def test_a_group_s_scorer_trains_and_is_left_out_of_evaluations(tiny_config: Any) -> None:
    rank = {"scorer": f"{__name__}:Rank", "sees": "group", "weight": 100.0}
    config = tiny_config(
        rewards={"a": {"scorer": f"{__name__}:Level"}, "rank": rank},
        group={"size": 4, "shard": 4},
        credit={"rule": "uniform"},
    )
    trained = asked(LocalFleet(config), "score_for_training")
    assert trained.values.tolist() == [10, 120, 230] and set(trained.components) == {"a", "rank"}
    shown = asked(LocalFleet(config), "score_for_evaluation")
    assert shown.values.tolist() == [10, 20, 30] and set(shown.components) == {"a"}


async def test_a_group_s_scorer_that_only_evaluates_compares_the_images_of_each_prompt(tiny_config: Any) -> None:
    """Levels 10, 30 of one prompt and 20, 5 of the next: the brighter of each has rank 1, whatever the others are."""
    rank = {"scorer": f"{__name__}:Rank", "sees": "group", "use": "evaluate"}
    config = tiny_config(rewards={"a": {"scorer": f"{__name__}:Level"}, "rank": rank}, evaluation={"batch": 4})
    fleet, images = LocalFleet(config), np.stack([np.full((4, 4, 3), level, np.uint8) for level in (10, 30, 20, 5)])
    await fleet.start()
    try:
        prompts = [Prompt(index=0, text=text) for text in "ppqq"]
        shown = await fleet.score_for_evaluation(images, prompts)  # type: ignore[arg-type]
        trained = await fleet.score_for_training(images, prompts)  # type: ignore[arg-type]
    finally:
        fleet.stop()
    assert shown.values.tolist() == [10, 30, 20, 5]
    assert shown.components["rank"].tolist() == [0, 1, 1, 0]
    assert set(trained.components) == {"a"}
