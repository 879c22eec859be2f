"""The algorithm on one page. It knows ports, not Ray and not torch; large arrays pass through it as handles.

    prompts ──► GroupStream ──► rollouts.sample ──► rewards.score ──► learner.update ──► weights.publish ──┐
                    ▲                (shards)          (pictures)        (groups)                          │
                    └──────────────────────────────── slots are released ◄────────────────────────────────┘

| who waits                | for what                      | who ends it                                   |
|--------------------------|-------------------------------|-----------------------------------------------|
| the loop                 | the oldest groups             | their production, or `stop`                   |
| a group                  | its shards, then their scores | the sources' deadlines                        |
| the loop                 | update, weights, publish      | the ports' deadlines                          |
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from learner.evaluate import Evaluation, evaluate
from learner.setting_aside import set_aside_if_void
from learner.stream import GroupStream
from protocol.config import RunConfig
from protocol.messages import LearnerState, PolicyWeights, Prompt, ScoredGroup, ScoredShard, ShardRequest
from protocol.ports import Metrics, Parts

Result = TypeVar("Result")


class Journal(Protocol):
    """Where the run's story is kept: the run folder, the progress bar."""

    def record(self, iteration: int, metrics: Metrics) -> None:
        """One iteration's numbers."""
        ...

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """One evaluation."""
        ...

    def save(self, state: LearnerState) -> None:
        """A checkpoint; whole or not at all."""
        ...


async def train(
    config: RunConfig,
    *,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    parts: Parts,
    journal: Journal,
    stop: asyncio.Event,
    start: int = 0,
    is_evaluated: bool = False,
) -> None:
    """Run iterations `start` to `config.iterations`; the learner already holds the state of `start`.

    Setting `stop` ends the run after the update in progress, with a checkpoint; groups and evaluations in flight are
    dropped, since their keys draw them again.

    Args:
        is_evaluated: whether the evaluation at `start` stands already.
    """
    groups = Groups(config, prompts, parts, policy=await _publish(parts))
    evaluator = Evaluator(config, heldout, parts, journal, stop)
    if not is_evaluated:
        await evaluator.assess_if_due(start, groups.policy)
    per_iteration = config.group.per_iteration
    stream = GroupStream(
        groups.produce,
        slots=per_iteration * (config.group.max_lag + 1),
        start=start * per_iteration,
        end=config.iterations * per_iteration,
    )
    saved = done = start
    async with stream:
        while done < config.iterations and not stop.is_set():
            clock = Clock()
            batch = await _unless(stop, stream.take(per_iteration))
            if batch is None:
                break
            clock.lap("rollout_and_reward")
            metrics = dict(await parts.learner.update(batch))
            clock.lap("update")
            groups.policy = await _publish(parts)
            stream.release(per_iteration)
            clock.lap("publish")
            done += 1
            journal.record(done, metrics | dict(parts.rewards.troubles()) | clock.seconds())
            await evaluator.assess_if_due(done, groups.policy)
            if done % config.checkpoint.every == 0 or done == config.iterations:
                journal.save(await parts.learner.state())
                saved = done
    if saved != done:
        journal.save(await parts.learner.state())


@dataclass
class Groups:
    """Draws and scores the run's groups with the newest published policy."""

    config: RunConfig
    prompts: Sequence[Prompt]
    parts: Parts
    policy: PolicyWeights

    async def produce(self, place: int) -> ScoredGroup:
        """The group at a place of the run, in shards."""
        iteration, group = divmod(place, self.config.group.per_iteration)
        prompt = prompt_at(self.prompts, place, seed=self.config.seed)
        members = self.config.group.shard
        version, digest = self.policy.version, self.policy.digest
        requests = [
            ShardRequest(
                iteration=iteration,
                group=group,
                prompt=prompt,
                first_member=first,
                members=members,
                version=version,
                digest=digest,
            )
            for first in range(0, self.config.group.size, members)
        ]
        shards = await asyncio.gather(*(_score_shard(self.parts, request) for request in requests))
        return ScoredGroup(prompt=prompt, shards=set_aside_if_void(shards))


@dataclass(frozen=True)
class Evaluator:
    """Scores the held-out prompts at the iterations that ask for it."""

    config: RunConfig
    heldout: Sequence[Prompt]
    parts: Parts
    journal: Journal
    stop: asyncio.Event

    async def assess_if_due(self, iteration: int, policy: PolicyWeights) -> None:
        """At the start, at the end and every `evaluation.every`; a stop ends it without a result."""
        every = self.config.evaluation.every
        if iteration not in (0, self.config.iterations) and not (every and iteration % every == 0):
            return
        began = time.monotonic()
        result = await _unless(self.stop, self._assess(policy))
        if result is not None:
            self.journal.evaluated(iteration, result.timed(time.monotonic() - began))

    async def _assess(self, policy: PolicyWeights) -> Evaluation:
        if self.config.evaluation.weights == "average":
            state = await self.parts.learner.state()
            assert state.average is not None, "the config refuses this evaluation without a running mean"
            policy = state.average
            await self.parts.weights.publish(policy)
        return await evaluate(
            self.config, prompts=self.heldout, parts=self.parts, version=policy.version, digest=policy.digest
        )


def prompt_at(prompts: Sequence[Prompt], place: int, *, seed: int) -> Prompt:
    """The prompt at a place of the run's endless sequence: passes over all prompts, each shuffled by (seed, pass)."""
    turn, offset = divmod(place, len(prompts))
    order = np.random.Generator(np.random.Philox(key=[seed, turn])).permutation(len(prompts))
    return prompts[order[offset]]


class Clock:
    """Wall seconds of one iteration's stages."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        """The stage that ends now."""
        now = time.monotonic()
        self._seconds[f"seconds/{stage}"] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """By stage, and their sum."""
        return self._seconds | {"seconds/iteration": sum(self._seconds.values())}


async def _publish(parts: Parts) -> PolicyWeights:
    weights = await parts.learner.weights()
    await parts.weights.publish(weights)
    return weights


async def _score_shard(parts: Parts, request: ShardRequest) -> ScoredShard:
    receipt, rollout, images = await parts.rollouts.sample(request)
    receipt.require(version=request.version, digest=request.digest)
    prompt, count = request.prompt, receipt.pictures
    scores = await parts.rewards.reward(images, [prompt.text] * count, [prompt.metadata] * count)
    return ScoredShard(rollout=rollout, scores=scores)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The work's result, or None when `stop` is set first; the work is then cancelled."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()
