"""Reward actors on a real Ray: killed ones lose no score, each failure policy does what it says."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from PIL import Image

from actors.pool.nodes import NodeFailures
from actors.rewards import pool as reward_pool
from actors.rewards.pool import RewardPools
from protocol.errors import InputError, PromptError, RewardError
from protocol.ground.condition_images import condition_of
from protocol.messages import Metadata, Prompt, Scores
from protocol.sink import StatusSink
from rewards.scores import partly
from tests.support.runs.sinks import Silent, Told

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]
NODES = NodeFailures(within_s=60)


class Moody:
    """The first pixel is the score; what goes wrong is in the metadata."""

    name = "moody"
    low = 0.0
    high = 255.0

    def __init__(self, *, needs: str = "", door: str = "") -> None:
        """With `needs`, nothing can be scored until that file is there; with `door`, the scorer makes the file
        `door`.knock and begins when the file `door` is there."""
        self._needs = needs
        if door:
            Path(f"{door}.knock").touch()
            end = time.monotonic() + 60
            while not os.path.exists(door) and time.monotonic() < end:
                time.sleep(0.01)

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.text == os.environ.get("MOODY_HATES"):
                raise PromptError(f"prompt line {prompt.index + 1}: hated")

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        if self._needs and not os.path.exists(self._needs):
            raise ConnectionError("down")
        reasons = []
        for line in metadata:
            mark = line.get("once")
            if mark and not os.path.exists(mark):
                Path(mark).touch()
                if line["does"] == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if line["does"] == "hang":
                    time.sleep(600)
                reasons.append("not this time")
            else:
                reasons.append(str(line.get("never", "")))
        return partly(images[:, 0, 0, 0], reasons, {"actor": [os.getpid() % 9999] * len(images)})


def pools(tiny_config: Any, sink: StatusSink | None = None, **reward: Any) -> RewardPools:
    settings = {"scorer": f"{__name__}:Moody", "cpus": 0, "timeout_s": 20.0} | reward
    config = tiny_config(rewards={"moody": settings}, evaluation={"component": "reward"})
    return RewardPools(config, NODES, sink or Silent())


def prompts_of(metadata: Sequence[dict[str, Any]], texts: str | None = None) -> list[Prompt]:
    texts = texts or "p" * len(metadata)
    return [Prompt(index=0, text=text, metadata=line) for text, line in zip(texts, metadata, strict=True)]


def run(source: RewardPools, *requests: tuple[list[int], list[dict[str, Any]]]) -> list[Scores]:
    """Score requests of (levels, metadata) at once."""

    async def scenario() -> list[Scores]:
        await source.pools["moody"].start()
        try:
            asked = []
            for levels, metadata in requests:
                images = np.zeros((len(levels), 2, 2, 3), np.uint8)
                images[:, 0, 0, 0] = levels
                asked.append(source.score_for_training(ray.put(images), prompts_of(metadata)))
            return await asyncio.gather(*asked)
        finally:
            source.pools["moody"].stop()

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_killed_a_hanging_and_a_failing_call_cost_tries_and_no_score(tiny_config: Any, tmp_path: Path) -> None:
    source = pools(tiny_config, actors=2, batch=4, timeout_s=5.0, tries=10)
    requests = [
        (list(range(10 * start, 10 * start + 10)), [{"once": str(tmp_path / does), "does": does}, *[{}] * 9])
        for start, does in enumerate(("die", "hang", "fail", ""))
    ]
    requests[3] = (requests[3][0], [{}] * 10)
    answers = run(source, *requests)
    assert [answer.values.tolist() for answer in answers] == [[float(n) for n in levels] for levels, _ in requests]
    reward = source.rewards["moody"]
    assert reward.queue.failed_calls >= 2, "the killed call, the hanging one, and any that a busy machine made late"
    assert reward.missing == 0 and reward.retried >= 3 and reward.queue.waiting == 0
    failures = source.failures()
    assert (
        failures["reward_pool/moody/failed_calls"] == reward.queue.failed_calls
        and "reward_pool/moody/missing" not in failures
    )


class Crowd(Moody):
    """A group's scorer: how many of the images are darker."""

    sees = "group"

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        held = super().score(images, prompts, metadata)
        darker = (held.values[:, None] > held.values[None, :]).sum(1)
        return partly(darker, held.reasons, {"size": [len(images)] * len(images)})


async def test_groups_are_scored_whole_whatever_the_batch_and_whatever_dies(tiny_config: Any, tmp_path: Path) -> None:
    """Four groups at once on two actors; one actor dies at the second group, and one image fails at first."""
    settings = {"scorer": f"{__name__}:Moody", "cpus": 0}
    crowd = settings | {"scorer": f"{__name__}:Crowd", "sees": "group", "actors": 2, "batch": 3, "batch_delay_s": 0.1}
    config = tiny_config(
        rewards={"crowd": crowd | {"timeout_s": 20.0}, "moody": settings},
        group={"size": 5, "shard": 5},
        credit={"rule": "uniform"},
    )
    source = RewardPools(config, NODES, Silent())
    marks = [{}, {"once": str(tmp_path / "die"), "does": "die"}, {"once": str(tmp_path / "fail"), "does": "fail"}, {}]
    reward = source.rewards["crowd"]
    await reward.pool.start()
    try:
        asked = []
        for group, mark in enumerate(marks):
            images = np.zeros((5, 2, 2, 3), np.uint8)
            images[:, 0, 0, 0] = [(3 * member + group) % 5 for member in range(5)]
            asked.append(reward.score(ray.put(images), prompts_of([mark, {}, {}, {}, {}])))  # type: ignore[arg-type]
        answers = await asyncio.gather(*asked)
    finally:
        reward.pool.stop()
    for group, answer in enumerate(answers):
        assert answer.values.tolist() == [(3 * member + group) % 5 for member in range(5)]
        assert answer.components["size"].tolist() == [5.0] * 5
    assert source.rewards["crowd"].retried == 10, "whole groups"


@pytest.mark.whole
async def test_an_evaluation_s_images_are_compared_prompt_by_prompt_on_several_actors(
    tiny_config: Any, tmp_path: Path
) -> None:
    """Three prompts of two images: at the second an actor dies, and of the third an image never has a score."""
    settings = {"scorer": f"{__name__}:Moody", "cpus": 0}
    crowd = settings | {"scorer": f"{__name__}:Crowd", "sees": "group", "use": "evaluate", "actors": 2}
    config = tiny_config(rewards={"crowd": crowd | {"timeout_s": 20.0}, "moody": settings}, evaluation={"batch": 6})
    source = RewardPools(config, NODES, Silent())
    images = np.zeros((6, 2, 2, 3), np.uint8)
    images[:, 0, 0, 0] = [1, 0, 0, 1, 1, 0]
    marks = [{}, {}, {"once": str(tmp_path / "die"), "does": "die"}, {}, {"never": "blurred"}, {}]
    reward = source.rewards["crowd"]
    await reward.pool.start()
    try:
        answer = await reward.score(ray.put(images), prompts_of(marks, "ppqqrr"), group=2)  # type: ignore[arg-type]
    finally:
        reward.pool.stop()
    np.testing.assert_array_equal(answer.values, np.array([1, 0, 0, 1, np.nan, 0], np.float32))
    np.testing.assert_array_equal(answer.components["size"], np.array([2, 2, 2, 2, np.nan, 2], np.float32))
    assert source.rewards["crowd"].retried == 2 + 2 * 2, "the images of a prompt are tried again together"


@pytest.mark.whole
@pytest.mark.parametrize("on_failure", ["missing", "pause"])
async def test_a_prompt_that_a_group_s_scorer_cannot_judge_is_missing_from_the_evaluation(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    """Four prompts of two images through the port; the third always fails. Its retries wait behind all other groups."""
    monkeypatch.setattr(reward_pool, "PAUSE_S", (0.2, 0.2))
    settings = {"scorer": f"{__name__}:Moody", "cpus": 0}
    crowd = settings | {"scorer": f"{__name__}:Crowd", "sees": "group", "use": "evaluate", "on_failure": on_failure}
    config = tiny_config(
        rewards={"crowd": crowd | {"timeout_s": 20.0}, "moody": settings},
        evaluation={"images_per_prompt": 2, "batch": 8},
    )
    source = RewardPools(config, NODES, Silent())
    images = np.zeros((8, 2, 2, 3), np.uint8)
    images[:, 0, 0, 0] = [1, 0] * 4
    marks: list[dict[str, Any]] = [{"never": "blurred"} if row in (4, 5) else {} for row in range(8)]
    for pool in source.pools.values():
        await pool.start()
    try:
        asked = source.score_for_evaluation(ray.put(images), prompts_of(marks, "ppqqrrss"))
        answer = await asyncio.wait_for(asked, 60)
    finally:
        for pool in source.pools.values():
            pool.stop()
    np.testing.assert_array_equal(answer.components["crowd"], np.array([1, 0, 1, 0, np.nan, np.nan, 1, 0], np.float32))
    np.testing.assert_array_equal(answer.components["crowd/size"], np.array([2] * 4 + [np.nan] * 2 + [2] * 2))
    reward = source.rewards["crowd"]
    assert (reward.missing, reward.paused_s, reward.retried) == (2, 0, 2 * 2), "the scorer works for other prompts"


class Beside(Moody):
    """The first pixel of the first condition image."""

    def score(self, images, prompts, metadata, conditions) -> Scores:
        return partly([row[0][0, 0, 0] for row in conditions], [""] * len(images))


async def test_condition_images_reach_the_scorer_by_their_files(tiny_config: Any, tmp_path: Path) -> None:
    for level in (5, 9):
        Image.fromarray(np.full((2, 3, 3), level, np.uint8)).save(tmp_path / f"{level}.png")
    prompts = [
        Prompt(index=0, text="p", conditions=(condition_of(tmp_path / f"{level}.png"),)) for level in (5, 9, 5, 5)
    ]
    source = pools(tiny_config, scorer=f"{__name__}:Beside", batch=3, tries=1)
    await source.pools["moody"].start()
    try:
        answer = await source.score_for_training(ray.put(np.zeros((4, 2, 2, 3), np.uint8)), prompts)  # type: ignore[arg-type]
    finally:
        source.pools["moody"].stop()
    assert answer.values.tolist() == [5, 9, 5, 5]


def test_what_stays_missing_is_masked_drops_its_group_or_ends_the_run(tiny_config: Any) -> None:
    request = ([1, 2], [{}, {"never": "blurred"}])
    told = Told()
    (kept,) = run(pools(tiny_config, told, tries=2), request)
    assert told.messages["ScoresComplete/moody"].endswith("has no score for 1 of 2 images; the first: blurred")
    assert kept.valid.tolist() == [True, False] and kept.reasons[1] == "blurred" and not kept.voids_group
    source = pools(tiny_config, on_failure="drop_group", tries=1)
    (dropped,) = run(source, request)
    assert dropped.voids_group and np.isnan(dropped.values[1]) and source.rewards["moody"].dropped == 1
    with pytest.raises(RewardError, match="reward moody has no score for 1 of 2 images after 3 tries: blurred"):
        run(pools(tiny_config, on_failure="fail"), request)


@pytest.mark.whole
def test_a_scorer_that_raises_shows_its_line_and_its_traceback_is_in_the_log_of_the_run_once(
    tiny_config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = pools(tiny_config, tries=1, args={"needs": str(tmp_path / "never")})
    for scores in run(source, *[([1, 2], [{}, {}])] * 3):
        assert scores.reasons[0].startswith("moody: ConnectionError: down (test_pool.py, line ")
    (told,) = [record for record in caplog.records if record.exc_info]
    assert told.getMessage().startswith("the scorer of reward moody raised: moody: ConnectionError: down (test_pool.py")
    assert 'raise ConnectionError("down")' in str(told.exc_info)
    failing = pools(tiny_config, told_last := Told(), tries=1, on_failure="fail", args={"needs": "/never"})
    with pytest.raises(RewardError, match=r"after one try: moody: ConnectionError: down \(test_pool.py, line \d+\);"):
        run(failing, ([1], [{}]))
    assert not told_last.messages, "the error says it all"


async def test_a_paused_reward_says_why_and_goes_on_by_itself(tiny_config: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reward_pool, "PAUSE_S", (0.2, 0.2))
    needs = tmp_path / "up"
    source = pools(tiny_config, on_failure="pause", tries=1, args={"needs": str(needs)})

    async def mend() -> str:
        while not (reason := source.rewards["moody"].paused_because):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        (status,) = source.statuses()
        needs.touch()
        assert status.trouble == f"paused: {reason}"
        return reason

    await source.pools["moody"].start()
    try:
        images = ray.put(np.full((3, 2, 2, 3), 7, np.uint8))
        scores, reason = await asyncio.gather(source.score_for_training(images, prompts_of([{}] * 3)), mend())  # type: ignore[return-value]
    finally:
        source.pools["moody"].stop()
    assert scores.values.tolist() == [7, 7, 7]
    assert reason.startswith("moody: ConnectionError: down (test_pool.py, line ")
    reward = source.rewards["moody"]
    assert source.statuses()[0].trouble == ""
    assert reward.paused_because == "" and reward.paused_s >= 0.2 and reward.missing == 0


@pytest.mark.whole
async def test_a_size_desired_while_a_paused_pool_is_made_anew_is_kept(
    tiny_config: Any, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(reward_pool, "PAUSE_S", (0.2, 0.2))
    door, knock = tmp_path / "door", tmp_path / "door.knock"
    door.touch()
    settings = {"scorer": f"{__name__}:Moody", "cpus": 0, "timeout_s": 20.0, "on_failure": "pause", "tries": 1}
    config = tiny_config(
        rewards={"moody": settings | {"args": {"door": str(door)}}},
        evaluation={"component": "reward"},
        cluster={"max_restarts": 0},
    )
    source = RewardPools(config, NODES, Silent())
    first = source.pools["moody"]
    await first.start()
    door.unlink()
    knock.unlink()
    images = ray.put(np.full((1, 2, 2, 3), 5, np.uint8))
    scoring = asyncio.ensure_future(
        source.score_for_training(images, prompts_of([{"once": str(tmp_path / "die"), "does": "die"}]))
    )
    while not knock.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    first.scale(3)
    door.touch()
    try:
        scores, desired = await scoring, source.pools["moody"].desired
    finally:
        source.pools["moody"].stop()
    assert scores.values.tolist() == [5]
    assert desired == 3


@pytest.mark.whole
def test_a_paused_reward_whose_pool_was_used_up_gets_a_new_one(tiny_config: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reward_pool, "PAUSE_S", (0.2, 0.2))
    settings = {"scorer": f"{__name__}:Moody", "cpus": 0, "timeout_s": 20.0, "on_failure": "pause", "tries": 1}
    source = RewardPools(
        tiny_config(rewards={"moody": settings}, evaluation={"component": "reward"}, cluster={"max_restarts": 0}),
        NODES,
        Silent(),
    )
    (scores,) = run(source, ([5], [{"once": str(tmp_path / "die"), "does": "die"}]))
    assert scores.values.tolist() == [5]
    assert source.rewards["moody"].queue.failed_calls == 1


async def test_a_runtime_environment_is_the_actors_own_and_checks_prompts_there(tiny_config: Any) -> None:
    source = pools(tiny_config, runtime_env={"env_vars": {"MOODY_HATES": "poems"}}, resources={"ocr_node": 1}, actors=1)
    assert "MOODY_HATES" not in os.environ
    await source.pools["moody"].start()
    try:
        await source.check([Prompt(index=0, text="a cat")])
        with pytest.raises(InputError, match="prompt line 3: hated"):
            await source.check([Prompt(index=2, text="poems")])
    finally:
        source.pools["moody"].stop()
