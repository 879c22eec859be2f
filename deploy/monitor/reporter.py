"""What a run says of itself, put together from its journal, its actors and its conditions."""

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
from deploy.folder.read import StatusFile
from deploy.monitor import summary as overview
from deploy.monitor.conditions import Conditions
from learner.loop.stream import GroupStream
from protocol.commands import Command
from protocol.config.run import RunConfig
from protocol.ports import Fleet
from protocol.status import Event, Phase, PoolStatus, RunStatus, TrajectoryRecord, run_id_of

log = logging.getLogger(__name__)
OURS = ("actors", "deploy", "flow", "learner", "rewards", "protocol", "toyworld")
ERRORS_SHOWN = 10
EVENTS_FILED = 200
"""Newest events that `status.json` holds."""


class Reporter(logging.Handler):
    """Made in the event loop that runs the training loop. A `StatusSink` that may be called from any thread; as a log
    handler it turns our warnings into events.

    reporter = Reporter(config, name="mine", lines=[], fleet=fleet)
    reporter.recorded(3, metrics)
    status = reporter.status()
    """

    def __init__(
        self, config: RunConfig, *, name: str, lines: Sequence[Mapping[str, Any]], fleet: Fleet | None = None
    ) -> None:
        super().__init__(logging.WARNING)
        self._config = config
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.fleet = fleet
        self.run = run_id_of(name)
        self.phase: Phase = "starting"
        self.conditions = Conditions()
        self.buffers = Buffers()
        self.staleness: int | None = None
        self.groups: GroupStream | None = None
        self.desired_sizes: dict[str, int] = {}
        self.is_pause_requested = False
        self._number = 0
        self._iteration = self._checkpoint = 0
        self._started = time.time()
        self._finished: deque[float] = deque(maxlen=21)
        self._busy: dict[str, float] = {}
        self._busy_share: dict[str, float] = {}
        self.rewind(lines)

    def rewind(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """The run goes on after these lines of metrics; on the board they replace what stands there."""
        self.session = uuid.uuid4().hex[:12]
        self.buffers.lines.clear()
        self.buffers.lines.extend(overview.line_of(seq, values) for seq, values in enumerate(lines, start=1))
        self._seq = len(lines)
        self._iteration = max((int(values["iteration"]) for values in lines), default=0)

    def begin(self, iteration: int) -> None:
        """The run goes on from this iteration's checkpoint; 0 is its start."""
        self._iteration = self._checkpoint = iteration
        self._mark()
        self.event(f"the run goes on from iteration {iteration}" if iteration else "the run begins")

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """State a condition; a change to what is not good is an event too."""
        if self._is_elsewhere(self.condition, type, holds, reason, message):
            return
        if self.conditions.set(type, holds, reason, message) and holds is False:
            self.event(f"{type}: {message}", "warning")

    def event(self, message: str, kind: str = "info") -> None:
        """Something happened."""
        if self._is_elsewhere(self.event, message, kind):
            return
        self._number += 1
        known = kind if kind in ("info", "warning", "error") else "warning"
        event = Event(number=self._number, time=time.time(), kind=known, message=message[:500])
        self.buffers.events.append(event)

    def emit(self, record: logging.LogRecord) -> None:
        """A warning or an error of ours becomes an event."""
        if record.name.partition(".")[0] in OURS and record.name != "deploy.run.events":  # these come as events anyway
            self.event(record.getMessage(), "error" if record.levelno >= logging.ERROR else "warning")

    def recorded(self, iteration: int, values: Mapping[str, Any]) -> None:
        """One iteration's line."""
        self._iteration = iteration
        self._append(values)
        self._share_work(float(values.get("seconds/iteration") or 0.0))
        self._mark()

    def evaluated(self, iteration: int, values: Mapping[str, Any]) -> None:
        """One evaluation's line."""
        self._append(values)
        self.event(f"held-out score {values['evaluation/score']:.4f} at iteration {iteration}")

    def saved(self, iteration: int) -> None:
        """A checkpoint."""
        self._checkpoint = iteration
        self.event(f"checkpoint of iteration {iteration}")

    def recorded_trajectories(self, record: TrajectoryRecord) -> None:
        """Recorded trajectories."""
        self.buffers.add_record(record)

    def status(self) -> RunStatus:
        """One glance, now."""
        lines = self.buffers.lines
        newest = next((line.values for line in reversed(lines) if overview.is_iteration(line)), {})
        stages = overview.stages_of(newest)
        actors = self.fleet.actors() if self.fleet else []
        left = self._config.iterations - self._iteration
        return RunStatus(
            run=self.run,
            session=self.session,
            phase=self.phase,
            iteration=self._iteration,
            iterations=self._config.iterations,
            eta_s=overview.eta_s(list(self._finished), left=left) if self.phase in ("running", "paused") else None,
            started=self._started,
            updated=time.time(),
            heartbeat_s=self._config.status.heartbeat_s,
            adapter_version=next((actor.adapter_version for actor in actors if actor.kind == "learner"), None),
            checkpoint=self._checkpoint or None,
            rewards=overview.rewards_of(lines),
            gains=overview.gains_of(newest),
            diagnostics=overview.diagnostics_of(newest, staleness=self.staleness),
            stages=stages,
            bottleneck=overview.bottleneck_of(stages, self._busy_share),
            queues=self._queues(),
            desired_sizes=self.desired_sizes,
            is_pause_requested=self.is_pause_requested,
            pools=self._pools(),
            actors=actors,
            conditions=self.conditions.all(),
            errors=[event for event in self.buffers.events if event.kind != "info"][-ERRORS_SHOWN:],
            trajectories=list(self.buffers.trajectories),
            lines=self._seq,
        )

    def file_text(self) -> str:
        """What `status.json` should hold now."""
        events, commands = list(self.buffers.events)[-EVENTS_FILED:], list(self.buffers.commands.values())
        return StatusFile(status=self.status(), events=events, commands=commands).model_dump_json(indent=1)

    def close_command(self, command: Command) -> None:
        """Keep a command with what came of it."""
        self.buffers.commands[command.id] = command

    def _is_elsewhere(self, function: Callable[..., None], *args: Any) -> bool:
        """From a thread other than the loop's the call is handed to the loop."""
        if threading.get_ident() == self._thread:
            return False
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)
        return True

    def _append(self, values: Mapping[str, Any]) -> None:
        self._seq += 1
        self.buffers.lines.append(overview.line_of(self._seq, values))

    def _mark(self) -> None:
        self._finished.append(time.monotonic())

    def _pools(self) -> list[PoolStatus]:
        pools = self.fleet.pools() if self.fleet else []
        return [pool.model_copy(update={"busy_share": self._busy_share.get(pool.name)}) for pool in pools]

    def _queues(self) -> dict[str, int]:
        groups = {"groups/in_work": self.groups.in_work, "groups/scored": self.groups.scored} if self.groups else {}
        return groups | (self.fleet.queues() if self.fleet else {})

    def _share_work(self, seconds: float) -> None:
        """Share of the iteration in which each pool's actors worked."""
        if self.fleet is None or not seconds:
            return
        busy, sizes = self.fleet.busy_seconds(), {pool.name: max(1, pool.ready) for pool in self.fleet.pools()}
        self._busy_share = {
            name: round(min(1.0, (busy[name] - self._busy.get(name, 0.0)) / (seconds * size)), 3)
            for name, size in sizes.items()
        }
        self._busy = busy
