"""A reward that pauses, on a queue in this process."""

import asyncio

from actors.pool.nodes import NodeFailures
from actors.rewards import pool as reward_pool
from actors.rewards.pool import RewardPools
from protocol.messages import Prompt, Scores
from rewards.scores import scored
from tests.support.runs.sinks import Silent


async def test_what_a_working_scorer_cannot_judge_is_missing_although_it_scores_others_all_the_time(
    tiny_config, monkeypatch
):
    monkeypatch.setattr(reward_pool, "PAUSE_S", (0.02, 0.02))
    settings = {"scorer": "tests.support.rewards.judges:Redness", "on_failure": "pause", "tries": 1}
    config = tiny_config(rewards={"red": settings}, evaluation={"component": "reward"})
    reward = RewardPools(config, NodeFailures(within_s=60), Silent()).rewards["red"]
    tries = 0

    async def score(images, piece, *, is_alone) -> Scores:
        nonlocal tries
        if piece.prompts == ("fine",):
            await asyncio.sleep(0)
            return scored([1.0])
        tries += 1
        await asyncio.sleep(0.01)  # others are scored meanwhile
        return Scores.missing(1, "not that")

    def asked(text: str) -> "asyncio.Task[Scores]":
        return asyncio.ensure_future(reward.score(None, [Prompt(index=0, text=text)]))

    monkeypatch.setattr(reward.queue, "score", score)
    refused = asked("odd")
    async with asyncio.timeout(10):
        while not refused.done():
            assert (await asked("fine")).valid.all()
    answer = await refused
    assert (answer.valid.tolist(), answer.reasons, tries) == ([False], ("not that",), 2)
    assert (reward.missing, reward.paused_because) == (1, "") and reward.paused_s > 0
