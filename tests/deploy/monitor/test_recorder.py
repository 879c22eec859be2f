"""The recorder of trajectories costs the loop nothing: what fails in it is a warning."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deploy.monitor.trajectories import TrajectoryRecorder
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from protocol.messages import Credit, Prompt, ScoredGroup, ScoredShard, ShardRequest
from protocol.ports import Ports
from rewards.scores import scored

PROMPT = Prompt(index=0, text="a")
REQUEST = ShardRequest(
    iteration=0, group=0, prompt=PROMPT, first_member=0, members=1, adapter_version=0, adapter_digest="d"
)


class Failing:
    """A learner that died."""

    async def credit(self, group: int) -> Credit:
        raise LearnerFailedError("the learner actor failed: killed")


class Silent:
    """A learner that never answers."""

    async def credit(self, group: int) -> Credit:
        await asyncio.Event().wait()
        raise AssertionError


class Late:
    """A learner that has made its next update already."""

    async def credit(self, group: int) -> Credit:
        return Credit(
            adapter_version=2, rewards=np.zeros((1, 2)), step_rewards=np.zeros((1, 1)), advantages=np.zeros((1, 1))
        )


@pytest.mark.parametrize(
    ("learner", "reason"),
    [(Failing(), "the learner actor failed: killed"), (Late(), "the learner holds the credit of iteration 2")],
)
def test_a_recording_that_fails_is_a_warning(
    tiny_config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture, learner: Any, reason: str
) -> None:
    records: list[Any] = []

    async def keep(record: Any) -> None:
        records.append(record)

    async def scene() -> int | None:
        ports = Ports(rollouts=None, rewards=None, learner=learner, adapters=None)  # type: ignore[arg-type]
        recorder = TrajectoryRecorder(tiny_config(), ports, sink=keep)
        shard = ScoredShard(rollout=None, facts=None, scores=scored([1.0]))  # type: ignore[arg-type]
        recorder.rolled_out(REQUEST, np.zeros((1, 2, 2, 3), np.uint8))  # type: ignore[arg-type]
        recorder.learned(0, [ScoredGroup(prompt=PROMPT, shards=(shard,))])
        await recorder.finish()
        return recorder.staleness

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(scene()) == 0
    assert records == []
    assert "the trajectories of iteration 1 were not recorded" in caplog.text and reason in caplog.text


async def test_a_learner_that_never_answers_delays_neither_an_iteration_nor_the_end(
    tiny_config: Callable[..., RunConfig],
) -> None:
    records: list[Any] = []

    async def keep(record: Any) -> None:
        records.append(record)

    ports = Ports(rollouts=None, rewards=None, learner=Silent(), adapters=None)  # type: ignore[arg-type]
    recorder = TrajectoryRecorder(tiny_config(), ports, sink=keep)
    shard = ScoredShard(rollout=None, facts=None, scores=scored([1.0]))  # type: ignore[arg-type]
    for iteration in range(3):
        request = replace(REQUEST, iteration=iteration)
        recorder.rolled_out(request, np.zeros((1, 2, 2, 3), np.uint8))  # type: ignore[arg-type]
        recorder.learned(iteration, [ScoredGroup(prompt=PROMPT, shards=(shard,))])
        await asyncio.sleep(0)
    await recorder.finish(timeout_s=0.01)
    assert records == []
