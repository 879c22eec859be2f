"""The status of a run, composed from its journal, its actors and its log."""

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploy.board.publisher import Buffers
from deploy.folder.location import job_id
from deploy.folder.read import StatusFile
from deploy.monitor import summary as overview
from deploy.monitor.credit_words import words_of
from deploy.monitor.journal import IN_JOURNAL, Listener
from deploy.presets import method_of
from flowcredit.packages import PACKAGES
from learner.loop.evaluate import Evaluation
from learner.loop.stream import GroupStream
from protocol.config.run import RunConfig
from protocol.ports import Fleet
from protocol.status import ENDED, Condition, Event, MetricLine, Phase, PoolStatus, RunStatus, run_id_of

ERRORS_SHOWN = 10
EVENTS_FILED = 200
"""Number of newest events in `status.json`."""


class Reporter(logging.Handler, Listener):
    """Composes the status; made in the event loop of the training loop, called from any thread.

    As a log handler it turns the project's warnings into events.

    reporter = Reporter(config, name="mine", lines=[], fleet=fleet)
    journal.join(reporter)
    status = reporter.status()
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        name: str,
        lines: Sequence[Mapping[str, Any]],
        fleet: Fleet,
        earlier: Callable[[int, int], Sequence[MetricLine]] = lambda *_: (),
    ) -> None:
        """
        Args:
            fleet: its actors, pools and queues are shown.
            earlier: reads metric lines that the buffers no longer hold, see `Buffers`.
        """
        super().__init__(logging.WARNING)
        self._config = config
        self._method, self._credit = method_of(config), words_of(config.credit)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._fleet = fleet
        self.run = run_id_of(name)
        self.phase: Phase = "starting"
        self.buffers = Buffers(earlier)
        self.staleness: int | None = None
        self.groups: GroupStream | None = None
        self.desired_sizes: dict[str, int] = {}
        self.is_pause_requested = False
        self._conditions: dict[str, Condition] = {}
        self._number = 0
        self._iteration = self._checkpoint = 0
        self._started = time.time()
        self._finished: deque[float] = deque(maxlen=21)
        self._busy: dict[str, float] = {}
        self._busy_share: dict[str, float] = {}
        self.rewind(lines)

    def rewind(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Start over with these lines of metrics; on the board they replace the earlier lines."""
        self.session = uuid.uuid4().hex[:12]
        self.buffers.lines.clear()
        self._evaluations: list[MetricLine] = []
        self._seq = 0
        for values in lines:
            self._append(values)
        self._iteration = max((int(values["iteration"]) for values in lines), default=0)

    def begin(self, iteration: int) -> None:
        """Show that the fleet is ready and the loop starts from the checkpoint of this iteration; 0: a new run."""
        self.phase = "running"
        self._iteration = self._checkpoint = iteration
        self._finished.append(time.monotonic())
        self.event(f"the run continues from iteration {iteration}" if iteration else "the run begins")

    def condition(self, now: Condition, before: Condition | None) -> None:
        """Keep a condition; add an event when it ceases to hold."""
        if self._is_elsewhere(self.condition, now, before):
            return
        self._conditions[now.type] = now
        if now.status == "False" and (before is None or before.status != "False"):
            self.event(f"{now.type}: {now.message}", "warning")

    def event(self, message: str, kind: str = "info") -> None:
        if self._is_elsewhere(self.event, message, kind):
            return
        self._number += 1
        known = kind if kind in ("info", "warning", "error") else "warning"
        event = Event(number=self._number, time=time.time(), kind=known, message=message[:500])
        self.buffers.events.append(event)

    def emit(self, record: logging.LogRecord) -> None:
        """Turn a warning or an error that one of our packages logs into an event."""
        if record.name.partition(".")[0] in PACKAGES and not hasattr(record, IN_JOURNAL):
            self.event(record.getMessage(), "error" if record.levelno >= logging.ERROR else "warning")

    def recorded(self, iteration: int, line: Mapping[str, Any]) -> None:
        self._iteration = iteration
        self._append(line)
        self._share_work(float(line.get("seconds/iteration") or 0.0))
        self._finished.append(time.monotonic())

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        self._append(evaluation.line(iteration))
        self._busy = self._fleet.busy_seconds()  # an evaluation's work is no iteration's
        self.event(f"held-out score {evaluation.score:.4f} at iteration {iteration}")

    def saved(self, iteration: int) -> None:
        """Keep the iteration of the newest checkpoint."""
        self._checkpoint = iteration
        self.event(f"checkpoint of iteration {iteration}")

    @property
    def is_saved(self) -> bool:
        """Whether the newest iteration has its checkpoint."""
        return 0 < self._iteration == self._checkpoint

    def status(self) -> RunStatus:
        """Compose the status as of now; conditions that do not hold come first, then the newest."""
        lines = self.buffers.lines
        shown = [*self._evaluations, *lines]
        metrics = overview.metrics_of(shown)
        is_over = self.phase in ENDED
        actors = self._fleet.actors()
        settled = {name for name, condition in self._conditions.items() if condition.status == "True"}
        troubles = [event for event in self.buffers.events if event.kind != "info"]
        left = self._config.iterations - self._iteration
        return RunStatus(
            run=self.run,
            session=self.session,
            job=job_id(),
            phase=self.phase,
            iteration=self._iteration,
            iterations=self._config.iterations,
            eta_s=overview.eta_s(self._finished, left=left) if self.phase in ("running", "paused") else None,
            started=self._started,
            updated=time.time(),
            heartbeat_s=self._config.status.heartbeat_s,
            adapter_version=next((actor.adapter_version for actor in actors if actor.kind == "learner"), None),
            checkpoint=self._checkpoint or None,
            method=self._method,
            credit=self._credit,
            rewards=overview.rewards_of(shown),
            metrics=metrics,
            staleness=self.staleness,
            bottleneck=overview.bottleneck_of(overview.stages_of(metrics), self._busy_share),
            queues=self._queues(),
            desired_sizes=self.desired_sizes,
            is_pause_requested=self.is_pause_requested,
            pools=self._pools(),
            actors=[actor.model_copy(update={"state": "ended"}) for actor in actors] if is_over else actors,
            conditions=sorted(self._conditions.values(), key=lambda c: (c.status == "True", -c.since, c.type)),
            errors=[each for each in troubles if each.message.partition(": ")[0] not in settled][-ERRORS_SHOWN:],
            trajectories=list(self.buffers.trajectories),
            lines=self._seq,
        )

    def file_text(self) -> str:
        """Compose the content of `status.json` as of now."""
        events, commands = list(self.buffers.events)[-EVENTS_FILED:], list(self.buffers.commands.values())
        return StatusFile(status=self.status(), events=events, commands=commands).model_dump_json(indent=1)

    def _is_elsewhere(self, function: Callable[..., None], *args: Any) -> bool:
        """If this is not the loop's thread, pass the call to the loop; return whether it was passed."""
        if threading.get_ident() == self._thread:
            return False
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)
        return True

    def _append(self, values: Mapping[str, Any]) -> None:
        self._seq += 1
        line = overview.line_of(self._seq, values)
        self.buffers.lines.append(line)
        if overview.is_evaluation(line):  # the first and the newest one; the buffer drops its oldest lines
            self._evaluations = [*self._evaluations[:1], line]

    def _pools(self) -> list[PoolStatus]:
        facts = {"ready": 0, "busy": 0} if self.phase in ENDED else {}
        return [
            pool.model_copy(update=facts | {"busy_share": self._busy_share.get(pool.name)})
            for pool in self._fleet.pools()
        ]

    def _queues(self) -> dict[str, int]:
        groups = {"groups/in_work": self.groups.in_work, "groups/scored": self.groups.scored} if self.groups else {}
        return groups | self._fleet.queues()

    def _share_work(self, seconds: float) -> None:
        """Compute the share of the last iteration in which each pool's actors worked."""
        if not seconds:
            return
        busy, sizes = self._fleet.busy_seconds(), {pool.name: max(1, pool.ready) for pool in self._fleet.pools()}
        self._busy_share = {
            name: round(min(1.0, (busy[name] - self._busy.get(name, 0.0)) / (seconds * size)), 3)
            for name, size in sizes.items()
        }
        self._busy = busy
