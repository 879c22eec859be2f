"""The algorithm on one page. It knows ports, not Ray and not torch; large arrays pass through it as handles.

    prompts ──► GroupStream ──► rollouts.sample ──► rewards.score ──► learner.update ──► weights.publish ──┐
                    ▲                (shards)          (pictures)        (groups)                          │
                    └──────────────────────────────── slots are released ◄────────────────────────────────┘

| who waits                | for what                      | who ends it                                   |
|--------------------------|-------------------------------|-----------------------------------------------|
| the loop                 | the oldest groups             | their production, or `stop`                   |
| a group                  | its shards, then their scores | the sources' deadlines                        |
| the loop                 | update, weights, publish      | the ports' deadlines                          |
| the loop, paused         | somebody who lets it go on    | `resume` or `stop`                            |

A group of iteration i is drawn by version max(0, i - max_lag), which is the one that the slots admit; naming it by
rule lets a run that goes on from a checkpoint draw the groups that were in flight exactly as before.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from learner.evaluate import Evaluation, evaluate
from learner.guards import Guards
from learner.lost import DRAWS, again_if_lost
from learner.setting_aside import set_aside_if_void
from learner.stream import GroupStream
from protocol.config import RunConfig
from protocol.errors import CheckpointError, RunFolderError, ShardLostError
from protocol.messages import LearnerState, PolicyWeights, Prompt, ScoredGroup, ScoredShard, ShardRequest
from protocol.ports import Metrics, Parts
from protocol.sink import StatusSink

Result = TypeVar("Result")
Save = Callable[[], Awaitable[bool]]
"""Writes a checkpoint; whether it could."""
Rest = Callable[[Save], Awaitable[None]]
"""Awaited between two iterations: a pause, a checkpoint that somebody asked for."""


class Journal(StatusSink, Protocol):
    """Where the run's story is kept: the run folder, the progress bar."""

    def record(self, iteration: int, metrics: Metrics) -> None:
        """One iteration's numbers."""
        ...

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """One evaluation."""
        ...

    def save(self, state: LearnerState) -> None:
        """A checkpoint, whole or not at all; RunFolderError when it cannot be written."""
        ...


Watch = Callable[[GroupStream], None]
"""Told of the groups in flight, to see how many wait."""


async def no_rest(_: Save) -> None:
    """Go on at once."""


def no_watch(_: GroupStream) -> None:
    """Nobody looks."""


async def train(
    config: RunConfig,
    *,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    parts: Parts,
    journal: Journal,
    stop: asyncio.Event,
    rest: Rest = no_rest,
    watch: Watch = no_watch,
    found: LearnerState | None = None,
    is_evaluated: bool = False,
) -> None:
    """Run the iterations after `found`, or all, up to `config.iterations`.

    Setting `stop` ends the run after the update in progress, with a checkpoint; groups and evaluations in flight are
    dropped, since their keys draw them again.

    Args:
        rest: may hold the loop between two iterations; it returns when `stop` is set.
        watch: may look at the groups in flight, and must not touch them.
        found: the checkpoint that the run goes on from; the learner holds it already.
        is_evaluated: whether the evaluation at its step stands already.
    """
    done = found.step if found else 0
    groups = Groups(config, prompts, parts)
    await groups.begin(found.recent if found else ())
    guards = Guards(config, journal, broken=found.broken if found else {})
    evaluator = Evaluator(config, heldout, parts, journal, stop)
    saver = Saver(groups, guards, journal, every=config.checkpoint.every, saved=done)
    if not is_evaluated:
        await evaluator.assess_if_due(done, groups.policy)
    per_iteration = config.group.per_iteration
    async with groups.stream(done) as stream:
        watch(stream)
        while done < config.iterations and not stop.is_set():
            clock = Clock()
            batch = await _unless(stop, stream.take(per_iteration))
            if batch is None:
                break
            clock.lap("rollout_and_reward")
            metrics = dict(await groups.learn(done, batch))
            clock.lap("update")
            await groups.publish()
            stream.release(per_iteration)
            clock.lap("publish")
            done += 1
            journal.record(done, metrics | dict(parts.rewards.troubles()) | clock.seconds())
            guards.check(done, metrics, groups.policy)
            await evaluator.assess_if_due(done, groups.policy)
            if done < config.iterations:
                await saver.save_if_due(done)
                await rest(saver.save)
    await saver.finish(done)


@dataclass
class Groups:
    """Draws, scores and learns from the run's groups; keeps the versions that groups in flight are drawn with."""

    config: RunConfig
    prompts: Sequence[Prompt]
    parts: Parts
    policies: dict[int, PolicyWeights] = field(default_factory=dict)

    @property
    def policy(self) -> PolicyWeights:
        """The newest published version."""
        return self.policies[max(self.policies)]

    async def begin(self, recent: Sequence[PolicyWeights]) -> None:
        """Publish the versions that the first groups are drawn with.

        Raises:
            CheckpointError: `recent` lacks one of them.
        """
        for weights in recent:
            await self._publish(weights)
        await self.publish()
        newest = self.policy.version
        lacking = sorted(set(range(max(0, newest - self.config.group.max_lag), newest)) - set(self.policies))
        if lacking:
            raise CheckpointError(f"a run with group.max_lag goes on with its older adapters, lacking {lacking}")

    async def publish(self) -> None:
        """Publish the learner's version, and forget the one that no group is drawn with any more."""
        await self._publish(await self.parts.learner.weights())
        self.policies.pop(self.policy.version - self.config.group.max_lag - 1, None)

    async def state(self) -> LearnerState:
        """The learner's state with the older versions that groups in flight are drawn with."""
        state = await self.parts.learner.state()
        older = [self.policies[version] for version in sorted(self.policies) if version < state.step]
        return replace(state, recent=tuple(older))

    def stream(self, start: int) -> GroupStream:
        """The groups of the iterations from `start` on; as many in flight as `max_lag` allows."""
        count = self.config.group.per_iteration
        return GroupStream(
            self.produce,
            slots=count * (self.config.group.max_lag + 1),
            start=start * count,
            end=self.config.iterations * count,
        )

    async def produce(self, place: int) -> ScoredGroup:
        """The group at a place of the run, in shards."""
        iteration, group = divmod(place, self.config.group.per_iteration)
        prompt = prompt_at(self.prompts, place, seed=self.config.seed)
        members = self.config.group.shard
        policy = self.policies[max(0, iteration - self.config.group.max_lag)]
        requests = [
            ShardRequest(
                iteration=iteration,
                group=group,
                prompt=prompt,
                first_member=first,
                members=members,
                version=policy.version,
                digest=policy.digest,
            )
            for first in range(0, self.config.group.size, members)
        ]
        shards = await asyncio.gather(
            *(again_if_lost(partial(_score_shard, self.parts, request)) for request in requests)
        )
        return ScoredGroup(prompt=prompt, shards=set_aside_if_void(shards))

    async def learn(self, iteration: int, batch: Sequence[ScoredGroup]) -> Metrics:
        """Update the learner; groups that were lost with a node before it had them are drawn once more."""
        first = iteration * self.config.group.per_iteration
        for _ in range(DRAWS - 1):
            try:
                return await self.parts.learner.update(batch)
            except ShardLostError:
                batch = await asyncio.gather(*(self.produce(first + group) for group in range(len(batch))))
        return await self.parts.learner.update(batch)

    async def _publish(self, weights: PolicyWeights) -> None:
        await self.parts.weights.publish(weights)
        self.policies[weights.version] = weights


@dataclass
class Saver:
    """Writes checkpoints. One that cannot be written is tried again with the next iteration; only the last one ends
    the run."""

    groups: Groups
    guards: Guards
    journal: Journal
    every: int
    saved: int
    """Newest step that was due and is written."""
    is_owed: bool = False

    async def save_if_due(self, done: int) -> None:
        """Every `every` iterations, and when one could not be written."""
        if done % self.every == 0 or self.is_owed:
            self.is_owed = not await self.save()
            self.saved = self.saved if self.is_owed else done

    async def save(self) -> bool:
        """Whether the checkpoint could be written; the older ones stand in any case."""
        kind = "CheckpointsWritten"
        try:
            self.journal.save(await self._state())
        except RunFolderError as error:
            self.journal.condition(kind, holds=False, reason="WriteFailed", message=str(error))
            return False
        self.journal.condition(kind, holds=True, reason="Written", message="the newest checkpoint is on disk")
        return True

    async def finish(self, done: int) -> None:
        """The last checkpoint.

        Raises:
            RunFolderError: it cannot be written.
        """
        if self.saved != done:
            self.journal.save(await self._state())

    async def _state(self) -> LearnerState:
        return replace(await self.groups.state(), broken=self.guards.broken)


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
