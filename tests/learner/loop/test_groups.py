"""Groups on ports without actors: order of prompts, dropped groups, and rollouts that slow rewards hold back."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from learner.loop.groups import Groups, Observer, drawn_prompts, drop_if_void, prompt_at
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from protocol.messages import (
    Adapter,
    Prompt,
    ScoredGroup,
    ScoredShard,
    Scores,
    ShardFacts,
    ShardReceipt,
    ShardRequest,
)
from protocol.ports import Ports
from rewards.scores import partly, scored
from tests.support.learning.groups import complete

Config = Callable[..., RunConfig]
PROMPTS = tuple(Prompt(index=index, text=str(index)) for index in range(4))


class Workshop:
    """All four ports: rollouts take no time, each call for scores takes a while. Counts what is in work."""

    def __init__(self, images: int) -> None:
        self._images = images
        self.waiting = self.most_waiting = self.shards = 0
        self.asked_while_full = 0
        self.limit = 10**9

    async def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, Any, Any]:
        self.asked_while_full += self.waiting >= self.limit
        await asyncio.sleep(0)
        self.shards += 1
        self.waiting += self._images
        self.most_waiting = max(self.most_waiting, self.waiting)
        index = np.zeros((request.members, 1), np.int64)
        receipt = ShardReceipt(
            adapter_version=request.adapter_version,
            adapter_digest=request.adapter_digest,
            images=self._images,
            facts=ShardFacts(request=request, steps=(0,), image_index=index, finals=("",) * request.members),
        )
        return receipt, request, self._images

    def parallel(self) -> int:
        return 1

    async def score_for_training(self, images: Any, prompts: Sequence[Prompt]) -> Scores:
        await asyncio.sleep(0.005)
        self.waiting -= len(prompts)
        return scored([0.5] * len(prompts))

    async def adapter(self) -> Adapter:
        return Adapter(version=0, arrays={}, digest="d")

    async def publish(self, adapter: Adapter) -> None:
        """Every actor has it."""

    async def update(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        return {"groups": float(len(groups))}


def groups_of(config: RunConfig, workshop: Workshop, observer: Observer | None = None) -> Groups:
    ports = Ports(rollouts=workshop, rewards=workshop, learner=workshop, adapters=workshop)  # type: ignore[arg-type]
    return Groups(config, PROMPTS, ports, observer or Observer())


async def test_slow_rewards_hold_shards_back_before_they_are_requested(tiny_config: Config) -> None:
    """6 groups of 2 shards: at most `queue` images wait beside the shard in rollout, and every shard is scored."""
    rewards = {"slow": {"scorer": "x:Y", "queue": 20}, "quick": {"scorer": "x:Y", "queue": 500}}
    config = tiny_config(rewards=rewards, group={"size": 4, "shard": 2, "per_iteration": 6}, iterations=1)
    images = 2 * config.sampling.steps
    workshop = Workshop(images)
    workshop.limit = 20
    groups = groups_of(config, workshop)
    await groups.begin(())
    async with groups.stream(0) as stream:
        assert len(await stream.take(6)) == 6
    assert (workshop.shards, workshop.waiting, workshop.asked_while_full) == (12, 0, 0)
    assert images <= workshop.most_waiting <= 20 + images


async def test_as_many_shards_as_there_are_rollout_actors_are_requested_whatever_the_queue(tiny_config: Config) -> None:
    class Wide(Workshop):
        """Twelve rollout actors; a rollout ends when all twelve are at work."""

        def __init__(self, images: int) -> None:
            super().__init__(images)
            self.all_busy = asyncio.Event()

        def parallel(self) -> int:
            return 12

        async def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, Any, Any]:
            answer = await super().rollout(request)
            if self.shards == 12:
                self.all_busy.set()
            await self.all_busy.wait()
            return answer

    rewards = {"slow": {"scorer": "x:Y", "queue": 1}}
    config = tiny_config(rewards=rewards, group={"size": 4, "shard": 2, "per_iteration": 6}, iterations=1)
    groups = groups_of(config, Wide(2 * config.sampling.steps))
    await groups.begin(())
    async with groups.stream(0) as stream:
        assert len(await stream.take(6)) == 6


async def test_a_shard_larger_than_the_queue_is_rolled_out_alone(tiny_config: Config) -> None:
    config = tiny_config(
        rewards={"slow": {"scorer": "x:Y", "queue": 1}}, group={"size": 4, "shard": 2, "per_iteration": 2}, iterations=1
    )
    workshop = Workshop(images=8)
    groups = groups_of(config, workshop)
    await groups.begin(())
    async with groups.stream(0) as stream:
        await stream.take(2)
    assert (workshop.shards, workshop.most_waiting) == (4, 8)


def test_the_observer_is_told_of_every_shard_and_of_the_update_that_succeeded(tiny_config: Config) -> None:
    seen: list[Any] = []

    class Noting(Observer):
        def rolled_out(self, request: ShardRequest, images: Any) -> None:
            seen.append((request.group, request.first_member))

        def learned(self, iteration: int, batch: Sequence[ScoredGroup]) -> None:
            seen.append((iteration, len(batch)))

    class Failing(Workshop):
        async def update(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
            raise LearnerFailedError("gone")

    config = tiny_config(
        rewards={"slow": {"scorer": "x:Y"}}, group={"size": 4, "shard": 2, "per_iteration": 1}, iterations=2
    )

    async def scene(workshop: Workshop) -> None:
        groups = groups_of(config, workshop, Noting())
        await groups.begin(())
        await groups.learn(0, complete([await groups.produce(0)]))

    asyncio.run(scene(Workshop(images=2)))
    assert seen == [(0, 0), (0, 2), (0, 1)]
    with pytest.raises(LearnerFailedError):
        asyncio.run(scene(Failing(images=2)))
    assert seen[3:] == [(0, 0), (0, 2)], "a failed update taught nothing"


def shard(scores: Scores) -> ScoredShard:
    return ScoredShard(rollout=None, facts=None, scores=scores)  # type: ignore[arg-type]


def test_a_void_image_drops_its_whole_group_and_no_other() -> None:
    kept = (shard(scored([1, 2])), shard(partly([1, float("nan")], ["", "lost"])))
    assert drop_if_void(PROMPTS[0], kept) == kept
    void = (kept[0], shard(replace(kept[1].scores, voids_group=True)))
    dropped = drop_if_void(PROMPTS[0], void)
    assert not any(each.scores.valid.any() for each in dropped)
    assert dropped[0].scores.reasons == ("the group is dropped: lost",) * 2


def test_a_group_without_any_score_is_named_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    blurred = shard(partly([float("nan")] * 2, ["blurred"] * 2))
    drop_if_void(Prompt(index=0, text="a cat"), (shard(scored([1, 2])), blurred))
    assert not caplog.text
    drop_if_void(Prompt(index=0, text="a cat"), (blurred,))
    assert "must have a valid score to train on, got none for 'a cat' (blurred)" in caplog.text
    assert "set rewards.NAME.on_failure" in caplog.text


def test_every_pass_shows_each_prompt_once_in_its_own_order() -> None:
    prompts = [Prompt(index=index, text=str(index)) for index in range(20)]
    orders = [[prompt_at(prompts, 20 * turn + index, seed=3).index for index in range(20)] for turn in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [prompt_at(prompts, index, seed=3).index for index in range(20)] == orders[0]
    assert [prompt_at(prompts, index, seed=4).index for index in range(20)] != orders[0]


def test_a_short_run_draws_the_first_prompts_of_its_order_and_a_long_one_all() -> None:
    prompts = [Prompt(index=index, text=str(index)) for index in range(20)]
    first = [prompt_at(prompts, index, seed=3) for index in range(6)]
    assert drawn_prompts(prompts, 6, seed=3) == first
    assert sorted(each.index for each in drawn_prompts(prompts, 50, seed=3)) == list(range(20))
