"""The journal of a run: it takes all metrics, evaluations, conditions and events, and passes them to listeners.

| listener   | module                    | output                                                   |
|------------|---------------------------|----------------------------------------------------------|
| `EventLog` | this one                  | `events.jsonl` and `run.log`                             |
| `Progress` | `deploy.monitor.progress` | the progress bar and lines on the terminal               |
| `Reporter` | `deploy.monitor.reporter` | the status, for the board and `status.json`              |
| `Trackers` | `deploy.monitor.trackers` | metrics for TensorBoard, Weights & Biases or another     |

Metrics, evaluations and checkpoints go into the run folder first. A thread writes them, and the loop awaits it: they
keep their order, and a slow disk stops neither the heartbeat nor the groups in flight. The failure of a listener is a
line in the log, never an exception in the run. Conditions and events may come from any thread.
"""

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.folder.names import EVENTS
from deploy.folder.run_folder import RunFolder
from learner.loop.evaluate import Evaluation
from protocol.errors import FlowcreditError, LeaseLostError, RunFolderError, one_line
from protocol.ground.files import append_whole, by_iteration
from protocol.messages import LearnerState
from protocol.ports import Metrics
from protocol.status import ActorStatus, Condition

log = logging.getLogger(__name__)
RUN_FAILED = "RunFailed"
"""Reason of a condition that ends the run: its message is also the last line of the run on the terminal."""
ACTORS_RECORDED = 8
"""Most actors of a kind whose usage is in `metrics.jsonl`; the status has all."""
IN_JOURNAL = "is_in_journal"
"""Attribute of the log records of conditions and events: the listeners have received them already."""


class Listener:
    """Base class of the journal's listeners; a listener overrides the methods that it needs."""

    def condition(self, now: Condition, before: Condition | None) -> None:
        """Receive a condition; `before` is the previous one of the same type."""

    def event(self, message: str, kind: str) -> None:
        """Receive an event; `kind` is `info`, `warning`, `error` or another word."""

    def recorded(self, iteration: int, line: Mapping[str, Any]) -> None:
        """Receive the numbers of a finished iteration; `line` also holds its `iteration`."""

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Receive the result of an evaluation."""

    def saved(self, iteration: int) -> None:
        """Receive the iteration of a checkpoint that was written."""


class RunJournal:
    """The journal of one run; implements `learner.loop.loop.Journal`.

    journal = RunJournal(run, progress)
    journal.join(reporter)
    journal.condition("ClusterFits", holds=True, reason="Fits", message="the cluster has room for all actors")
    """

    def __init__(self, run: RunFolder, *listeners: Listener) -> None:
        self.iteration = 0
        self.actors: Callable[[], Sequence[ActorStatus]] = tuple
        """Describes the run's actors: what they use joins the numbers of an iteration."""
        self._run = run
        self._listeners: list[Listener] = [EventLog(run), *listeners]
        self._conditions: dict[str, Condition] = {}
        self._passing_on = threading.RLock()

    def join(self, listener: Listener) -> None:
        """Add a listener and pass it the current conditions."""
        with self._passing_on:
            for condition in self._conditions.values():
                listener.condition(condition, None)
            self._listeners.append(listener)

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """State a condition; its `since` moves only when its status changes."""
        status = "Unknown" if holds is None else "True" if holds else "False"
        with self._passing_on:
            before = self._conditions.get(type)
            since = before.since if before and before.status == status else time.time()
            now = Condition(type=type, status=status, reason=reason, message=message, since=since)
            self._conditions[type] = now
            self._pass_on(lambda listener: listener.condition(now, before))

    def event(self, message: str, kind: str = "info") -> None:
        with self._passing_on:
            self._pass_on(lambda listener: listener.event(message, kind))

    async def record(self, iteration: int, metrics: Metrics) -> None:
        self.iteration = iteration
        line = {"iteration": iteration, **metrics}
        with harmless("what the actors use is not recorded"):
            line |= usage_of(self.actors())
        await asyncio.to_thread(self._append, line)
        log.info("iteration %d done, reward %.4f", iteration, metrics["reward/mean"])
        self._pass_on(lambda listener: listener.recorded(iteration, line))

    async def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Write an evaluation and its gallery; the score is kept even if the gallery cannot be drawn."""
        await asyncio.to_thread(self._draw, iteration, evaluation)
        evaluation = replace(evaluation, change=await asyncio.to_thread(self._change, iteration, evaluation))
        await asyncio.to_thread(self._append, evaluation.line(iteration))
        log.info("evaluation at iteration %d: %.4f", iteration, evaluation.score)
        self._pass_on(lambda listener: listener.evaluated(iteration, evaluation))

    async def save(self, state: LearnerState) -> None:
        path = await asyncio.to_thread(self._run.save, state)
        log.info("checkpoint %s, adapter %s", path, state.adapter.digest)
        self._pass_on(lambda listener: listener.saved(state.iteration))

    def checkpoint(self, iteration: int) -> Path | None:
        return by_iteration(self._run.checkpoints).get(iteration)

    def _pass_on(self, call: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            with harmless(f"{type(listener).__name__} failed"):
                call(listener)

    def _draw(self, iteration: int, evaluation: Evaluation) -> None:
        from deploy.folder.gallery import write_gallery
        from deploy.folder.heldout import write_heldout

        kind = "GalleryWritten"
        try:
            with self._run.writing():
                write_heldout(self._run.gallery, iteration, evaluation, self._run.config.evaluation)
                write_gallery(self._run.gallery, iteration, evaluation)
        except RunFolderError as error:
            self.condition(kind, holds=False, reason="WriteFailed", message=str(error))
        except LeaseLostError:
            raise
        except Exception as error:
            log.exception("the images of iteration %d cannot be drawn", iteration)
            message = f"the images of iteration {iteration} cannot be drawn: {one_line(error)}"
            self.condition(kind, holds=False, reason="DrawingFailed", message=message)
        else:
            self.condition(kind, holds=True, reason="Written", message="gallery/ is written again")

    def _change(self, iteration: int, evaluation: Evaluation) -> tuple[float, float] | None:
        """Return the interval of the change since the first evaluation; None if there is none, or it is unreadable."""
        from deploy.folder.heldout import heldout_of, read_heldout
        from deploy.folder.paired import paired_difference, why_unpaired

        with harmless("the change of the held-out score has no interval"):
            now = heldout_of(iteration, evaluation, self._run.config.evaluation)
            first = next(iter(read_heldout(self._run.path)), now)
            if first.iteration < iteration and why_unpaired(first, now) is None:
                found = paired_difference([first], [now])
                return (found.low, found.high) if found else None
        return None

    def _append(self, line: Metrics) -> None:
        kind = "MetricsWritten"
        try:
            self._run.append(line)
        except RunFolderError as error:
            self.condition(kind, holds=False, reason="WriteFailed", message=str(error))
        else:
            self.condition(kind, holds=True, reason="Written", message="metrics.jsonl is written again")


class EventLog(Listener):
    """Writes conditions and events to `events.jsonl` and to the log; with a full disk, to the log only."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def condition(self, now: Condition, before: Condition | None) -> None:
        """Write one line if the condition has changed."""
        if not is_news(now, before):
            return
        holds = {"True": True, "False": False, "Unknown": None}[now.status]
        level = logging.INFO if holds else logging.WARNING
        log.log(level, "%s is %s (%s): %s", now.type, holds, now.reason, now.message, extra={IN_JOURNAL: True})
        self._write({"type": now.type, "holds": holds, "reason": now.reason, "message": now.message})

    def event(self, message: str, kind: str) -> None:
        log.log(logging.INFO if kind == "info" else logging.WARNING, "%s", message, extra={IN_JOURNAL: True})
        self._write({"type": kind, "message": message})

    def _write(self, line: Mapping[str, object]) -> None:
        if not self._run.is_writer():
            return
        path = self._run.path / EVENTS
        try:
            append_whole(path, json.dumps({"time": round(time.time(), 3), **line}) + "\n")
        except OSError as error:
            log.warning("%s could not be written: %s", path, error)


def is_news(now: Condition, before: Condition | None) -> bool:
    """Return whether the status or the reason of a condition has changed; a first one is news unless it holds."""
    if before is None:
        return now.status != "True"
    return (now.status, now.reason) != (before.status, before.reason)


def usage_of(actors: Sequence[ActorStatus]) -> dict[str, float]:
    """Return what the first actors of each kind use, by the names of docs/metrics.md."""
    seen = Counter[str]()
    found: dict[str, float | None] = {}
    for actor in actors:
        seen[actor.kind] += 1
        if seen[actor.kind] <= ACTORS_RECORDED:
            held = actor.usage
            found[f"usage/{actor.name}/memory_gib"] = _gib(held.memory_bytes)
            found[f"usage/{actor.name}/gpu_memory_gib"] = _gib(held.gpu_memory_bytes)
            found[f"usage/{actor.name}/gpu_share"] = held.gpu_share
    return {name: value for name, value in found.items() if value is not None}


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 3)


@contextmanager
def harmless(what: str) -> Iterator[None]:
    """Log any exception of the block instead of raising it; `what` describes the consequence."""
    try:
        yield
    except (FlowcreditError, OSError) as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s", what)
