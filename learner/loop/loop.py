"""The algorithm on one page. It knows ports, not Ray and not torch; large arrays pass through it as handles.

    prompts ─► GroupStream ─► rollouts.rollout ─► rewards.score_for_training ─► learner.update ─► adapters.publish ─┐
                   ▲              (shards)                (images)                 (groups)                         │
                   └──────── slots are released ◄─── evaluation, checkpoint or pause, if one is due ◄───────────────┘

| waits                    | for                           | at most until                                 |
|--------------------------|-------------------------------|-----------------------------------------------|
| the loop                 | the oldest groups             | their production ends, or `stop`              |
| a group                  | its shards, then their scores | the sources' deadlines                        |
| the loop                 | update, adapter, publish      | the ports' deadlines                          |
| an evaluation            | the groups in flight          | their production ends, or `stop`              |
| the loop, paused         | a command                     | `resume` or `stop`                            |
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from learner.loop.evaluate import Evaluation, evaluate
from learner.loop.groups import Groups, Observer
from learner.loop.guards import Guards
from learner.loop.hacking import HackingGuard, Measured
from learner.loop.stopping import end, unless_failed, unless_stopped
from learner.loop.stream import GroupStream
from protocol.config.run import RunConfig
from protocol.errors import GuardError, RunFolderError
from protocol.messages import Adapter, LearnerState, Prompt
from protocol.ports import Metrics, Ports
from protocol.sink import StatusSink

Save = Callable[[], Awaitable[bool]]
"""Writes a checkpoint; returns whether it is on disk."""
BetweenIterations = Callable[[Save], Awaitable[None]]
"""Awaited between two iterations: it may pause the loop, or write a checkpoint on request."""


class Journal(StatusSink, Protocol):
    """Receives everything that the loop reports; implemented by `deploy.monitor.journal`."""

    async def record(self, iteration: int, metrics: Metrics) -> None:
        """Keep one iteration's numbers."""
        ...

    async def evaluated(self, iteration: int, evaluation: Evaluation) -> None: ...

    async def save(self, state: LearnerState) -> None:
        """Write a checkpoint, whole or not at all (RunFolderError: it cannot be written)."""
        ...

    def checkpoint(self, iteration: int) -> Path | None:
        """Return the folder of an iteration's checkpoint; None if there is none."""
        ...


async def no_pause(_: Save) -> None: ...


async def train(
    config: RunConfig,
    *,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    ports: Ports,
    journal: Journal,
    stop: asyncio.Event,
    between: BetweenIterations = no_pause,
    observer: Observer | None = None,
    resume_from: LearnerState | None = None,
    is_evaluated: bool = False,
    evaluated: Sequence[Measured] = (),
) -> None:
    """Run the iterations after `resume_from`, or all, up to `config.iterations`.

    Setting `stop` ends the run after the update in progress, with a checkpoint; groups and evaluations in flight are
    dropped: the same command generates them again, bit for bit.

    Args:
        journal: receives numbers, evaluations, checkpoints and conditions.
        between: may pause the loop between two iterations; it returns when `stop` is set.
        observer: is told about the groups in flight; it must not change them.
        resume_from: the checkpoint from which the run resumes; the learner holds it already.
        is_evaluated: whether its evaluation is done already.
        evaluated: the evaluations before the checkpoint, oldest first.
    """
    done = resume_from.iteration if resume_from else 0
    groups = Groups(config, prompts, ports, observer)
    await groups.begin(resume_from.recent if resume_from else ())
    guards = Guards(config, journal, broken=resume_from.broken if resume_from else {})
    hacking = HackingGuard(config, journal, find=journal.checkpoint, earlier=evaluated)
    evaluator = Evaluator(config, heldout, ports, journal, stop, hacking)
    saver = Saver(groups, guards, hacking, journal, every=config.checkpoint.every, saved=done)
    if not is_evaluated:
        await evaluator.assess_if_due(done, groups.adapter)
    if resume_from is None:
        await saver.save_if_peak(done)
    per_iteration = config.group.per_iteration
    async with groups.stream(done) as stream:
        clock = Clock(stream)
        while done < config.iterations and not stop.is_set():
            learning = asyncio.ensure_future(groups.learn(done, stream.oldest(per_iteration)))
            try:
                if await unless_stopped(stop, unless_failed(learning, stream.take(per_iteration))) is None:
                    break
                clock.lap("rollout_and_reward")
                metrics = dict(await learning)
                clock.lap("update")
            finally:
                await end(learning)
            await groups.publish()
            clock.lap("publish")
            done += 1
            await journal.record(done, metrics | dict(ports.rewards.failures()) | clock.seconds())
            guards.check(done, metrics, groups.adapter)
            with clock.stopped():
                try:
                    await evaluator.assess_if_due(done, groups.adapter, after=stream)
                except GuardError:
                    await saver.save_if_peak(done)  # another watched scorer may be at its highest
                    raise
                if done < config.iterations:
                    await saver.save_if_due(done)
                    await between(saver.save)
            stream.release(per_iteration)
    await saver.finish(done)


@dataclass
class Saver:
    """Writes checkpoints. A failed write is tried again after the next iteration; at the end it is an error."""

    groups: Groups
    guards: Guards
    hacking: HackingGuard
    journal: Journal
    every: int
    saved: int
    """Newest iteration whose checkpoint was due and has been written."""
    is_overdue: bool = False

    async def save_if_due(self, done: int) -> None:
        """Save after every `every` iterations, at a peak of a watched scorer, and when the last write failed."""
        if done % self.every == 0 or self.is_overdue:
            await self._save_now(done)
        else:
            await self.save_if_peak(done)

    async def save_if_peak(self, done: int) -> None:
        """Save if a watched scorer is now at its highest."""
        if done in self.hacking.peaks:
            await self._save_now(done)

    async def save(self) -> bool:
        """Write a checkpoint and return whether it is on disk; if not, the older ones remain."""
        kind = "CheckpointsWritten"
        try:
            await self._write()
        except RunFolderError as error:
            self.journal.condition(kind, holds=False, reason="WriteFailed", message=str(error))
            return False
        self.journal.condition(kind, holds=True, reason="Written", message="the newest checkpoint is on disk")
        return True

    async def finish(self, done: int) -> None:
        """Write the last checkpoint.

        Raises:
            RunFolderError: it cannot be written.
        """
        if self.saved != done:
            await self._write()

    async def _save_now(self, done: int) -> None:
        self.is_overdue = not await self.save()
        self.saved = self.saved if self.is_overdue else done

    async def _write(self) -> None:
        await self.journal.save(replace(await self.groups.state(), broken=self.guards.broken))


@dataclass(frozen=True)
class Evaluator:
    """Scores the held-out prompts at the iterations at which an evaluation is due."""

    config: RunConfig
    heldout: Sequence[Prompt]
    ports: Ports
    journal: Journal
    stop: asyncio.Event
    hacking: HackingGuard

    async def assess_if_due(self, iteration: int, adapter: Adapter, *, after: GroupStream | None = None) -> None:
        """Evaluate at the start, at the end and every `evaluation.every`; a stop ends it without a result.

        The groups in flight `after` which it begins are scored first, so it does not slow them down.
        """
        every = self.config.evaluation.every
        if iteration not in (0, self.config.iterations) and not (every and iteration % every == 0):
            return
        result = await unless_stopped(self.stop, self._assess(adapter, after))
        if result is not None:
            await self.journal.evaluated(iteration, result)
            self.hacking.check(Measured(iteration, result.by_image, result.readings))

    async def _assess(self, adapter: Adapter, after: GroupStream | None) -> Evaluation:
        if after:
            await after.settled()
        began = time.monotonic()
        if self.config.evaluates_another_adapter:
            state = await self.ports.learner.state()
            adapter = state.adapter
            if self.config.evaluation.adapter == "average":
                assert state.average is not None, "the config refuses this evaluation without a running mean"
                adapter = state.average
            await self.ports.adapters.publish(adapter)
        result = await evaluate(self.config, prompts=self.heldout, ports=self.ports, adapter=adapter)
        return replace(result, seconds=time.monotonic() - began)


class Clock:
    """Training seconds: wall seconds of the stages of each iteration, without evaluations, checkpoints and pauses."""

    def __init__(self, stream: GroupStream) -> None:
        self._stream = stream
        self._seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        """Note that a stage ends now."""
        now = time.monotonic()
        self._seconds[f"seconds/{stage}"] = now - self._last
        self._last = now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out the seconds of the block, except while groups in flight are still made."""
        began = time.monotonic()
        yield
        self._last += time.monotonic() - max(began, self._stream.worked_until)

    def seconds(self) -> dict[str, float]:
        """Return the newest iteration's seconds by stage, and their sum."""
        return self._seconds | {"seconds/iteration": sum(self._seconds.values())}
