"""The groups of a run. Each has a prompt, an adapter version and shards, which are rolled out, scored and trained on.

The groups of iteration i are rolled out with adapter version max(0, i - max_lag), the version that the slots of the
stream admit. Because a rule names the version, a resumed run repeats the groups that were in flight exactly.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from learner.loop.stream import GroupStream, ImageBudget
from protocol.config.run import RunConfig
from protocol.errors import CheckpointError, ShardLostError
from protocol.messages import Adapter, LearnerState, Prompt, ScoredGroup, ScoredShard, Scores, ShardRequest
from protocol.ports import ImagesHandle, Metrics, Ports

log = logging.getLogger(__name__)
Result = TypeVar("Result")
TRIES = 3
"""How often the same shard or group is made; if it is lost that often, the run ends."""


class Observer:
    """Is told about the groups; this base class ignores them. Methods return at once and never raise."""

    def begins(self, groups: GroupStream) -> None:
        """Called when the loop starts, or starts again from a checkpoint, with these groups."""

    def rolled_out(self, request: ShardRequest, images: ImagesHandle) -> None:
        """Called when a shard was rolled out."""

    def learned(self, iteration: int, batch: Sequence[ScoredGroup]) -> None:
        """Called when the learner made adapter version `iteration` + 1 from these groups."""


class Groups:
    """Rolls out, scores and learns from the run's groups; keeps the adapters that groups in flight need."""

    def __init__(
        self, config: RunConfig, prompts: Sequence[Prompt], ports: Ports, observer: Observer | None = None
    ) -> None:
        """
        Args:
            config: sizes of groups and shards, staleness, seed.
            observer: is told about every shard and update.
        """
        self._config = config
        self._prompts = prompts
        self._ports = ports
        self._observer = observer or Observer()
        self._adapters: dict[int, Adapter] = {}
        queue = min(config.rewards[name].queue for name in config.reward_weights)
        self._budget = ImageBudget(queue, parallel=ports.rollouts.parallel)

    @property
    def adapter(self) -> Adapter:
        """The newest published adapter."""
        return self._adapters[max(self._adapters)]

    async def begin(self, recent: Sequence[Adapter]) -> None:
        """Publish the adapters that the first groups need.

        Raises:
            CheckpointError: `recent` lacks one of them.
        """
        for adapter in recent:
            await self._publish(adapter)
        await self.publish()
        newest = self.adapter.version
        lacking = sorted(set(range(max(0, newest - self._config.group.max_lag), newest)) - set(self._adapters))
        if lacking:
            raise CheckpointError(f"a run with group.max_lag resumes with its older adapters, lacking {lacking}")

    async def publish(self) -> None:
        """Publish the learner's adapter and forget the version that no group needs any more."""
        await self._publish(await self._ports.learner.adapter())
        self._adapters.pop(self.adapter.version - self._config.group.max_lag - 1, None)

    async def state(self) -> LearnerState:
        """Copy the learner's state with the older adapters that groups in flight need."""
        state = await self._ports.learner.state()
        older = [self._adapters[version] for version in sorted(self._adapters) if version < state.iteration]
        return replace(state, recent=tuple(older))

    def stream(self, start: int) -> GroupStream:
        """Stream the groups from iteration `start` on; `max_lag` bounds how many are in flight."""
        count = self._config.group.per_iteration
        stream = GroupStream(
            self.produce,
            slots=count * (self._config.group.max_lag + 1),
            start=start * count,
            end=self._config.iterations * count,
        )
        self._observer.begins(stream)
        return stream

    async def produce(self, index: int) -> ScoredGroup:
        """Roll out and score the group with this index, counted from the start of the run."""
        iteration, group = divmod(index, self._config.group.per_iteration)
        prompt = prompt_at(self._prompts, index, seed=self._config.seed)
        members = self._config.group.shard
        adapter = self._adapters[max(0, iteration - self._config.group.max_lag)]
        requests = [
            ShardRequest(
                iteration=iteration,
                group=group,
                prompt=prompt,
                first_member=first,
                members=members,
                adapter_version=adapter.version,
                adapter_digest=adapter.digest,
            )
            for first in range(0, self._config.group.size, members)
        ]
        shards = await asyncio.gather(
            *(again_if_lost(partial(self._rollout_and_score, request)) for request in requests)
        )
        return ScoredGroup(prompt=prompt, shards=drop_if_void(prompt, shards))

    async def learn(self, iteration: int, pending: Sequence["asyncio.Future[ScoredGroup]"]) -> Metrics:
        """Update the learner with the groups of one iteration; groups that were lost with a node are made again."""
        first = iteration * self._config.group.per_iteration
        tries: list[Sequence[asyncio.Future[ScoredGroup]]] = []

        async def update() -> Metrics:
            if tries:
                tries.append([asyncio.ensure_future(self.produce(first + group)) for group in range(len(pending))])
            else:
                tries.append(pending)
            return await self._ports.learner.update(tries[-1])

        try:
            metrics = await again_if_lost(update)
        finally:
            for group in (group for made in tries[1:] for group in made):
                group.cancel()
        batch = [group.result() for group in tries[-1]]
        self._observer.learned(iteration, batch)
        return {**metrics, **work_of(batch)}

    async def _rollout_and_score(self, request: ShardRequest) -> ScoredShard:
        points = self._config.images_per_member
        async with self._budget.room(request.members * points):
            receipt, rollout, images = await self._ports.rollouts.rollout(request)
            receipt.require_adapter_of(request)
            self._observer.rolled_out(request, images)
            scores = await self._ports.rewards.score_for_training(images, [request.prompt] * receipt.images)
        return ScoredShard(rollout=rollout, facts=receipt.facts, scores=scores, work=receipt.work)

    async def _publish(self, adapter: Adapter) -> None:
        await self._ports.adapters.publish(adapter)
        self._adapters[adapter.version] = adapter


def prompt_at(prompts: Sequence[Prompt], index: int, *, seed: int) -> Prompt:
    """Choose the prompt of one group from an endless sequence of passes over all prompts.

    Args:
        index: the group's index, counted from the start of the run.
        seed: keys the shuffled order of each pass, together with the pass's number.
    """
    turn, offset = divmod(index, len(prompts))
    return prompts[_order(len(prompts), seed, turn)[offset]]


def drawn_prompts(prompts: Sequence[Prompt], groups: int, *, seed: int) -> list[Prompt]:
    """Return the prompts of the first `groups` groups of a run, each once."""
    return [prompts[index] for index in _order(len(prompts), seed, 0)[:groups]]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, turn: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, turn])).permutation(count)


async def again_if_lost(make: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of `make`, and call it again if its trajectories or images were lost with a node.

    The same request gives the same bits.

    Raises:
        ShardLostError: they were lost `TRIES` times.
    """
    for _ in range(TRIES - 1):
        with suppress(ShardLostError):
            return await make()
    return await make()


def work_of(batch: Sequence[ScoredGroup]) -> Metrics:
    """Add up the work of rolling out and scoring these groups, by the names of docs/metrics.md."""
    total: defaultdict[str, float] = defaultdict(float)
    for shard in (shard for group in batch for shard in group.shards):
        for name, number in (*shard.work.items(), ("work/scoring_seconds", shard.scores.seconds)):
            total[name] += number
    return total


def drop_if_void(prompt: Prompt, shards: Sequence[ScoredShard]) -> tuple[ScoredShard, ...]:
    """Drop a group's scores if one of them failed under `drop_group`; warn if the group has no score at all.

    A dropped group keeps its index in the iteration and teaches nothing: all its step rewards are masked.
    """
    reason = next(filter(None, (reason for shard in shards for reason in shard.scores.reasons)), "no reason given")
    if not any(shard.scores.valid.any() for shard in shards):
        log.warning(
            "a group must have a valid score to train on, got none for %r (%s): it is left out; fix the scorer, or"
            " set rewards.NAME.on_failure to pause or fail",
            prompt.text,
            reason,
        )
    if not any(shard.scores.voids_group for shard in shards):
        return tuple(shards)
    missing = f"the group is dropped: {reason}"
    return tuple(
        replace(s, scores=replace(Scores.missing(len(s.scores.reasons), missing), seconds=s.scores.seconds))
        for s in shards
    )
