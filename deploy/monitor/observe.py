"""Making a run visible and steerable while it goes: board, status, recordings, trackers, commands, the page.

Nothing here may delay or fail the run: what goes wrong becomes a condition and a line in the log.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from deploy.board.board import Board
from deploy.board.embedded import BoardServer
from deploy.board.publisher import Publisher
from deploy.folder.files import write_whole
from deploy.folder.names import STATUS
from deploy.folder.read import status_of
from deploy.folder.run_folder import RunFolder
from deploy.monitor.control import Control
from deploy.monitor.page_server import PageServer
from deploy.monitor.reporter import Reporter
from deploy.monitor.trackers import Trackers
from deploy.monitor.trajectories import TrajectoryRecorder, read_records, write_record
from deploy.run.signals import end_all
from learner.loop.evaluate import Evaluation
from learner.loop.groups import Observer
from learner.loop.guards import guard_of
from learner.loop.loop import Journal
from learner.loop.stream import GroupStream
from protocol.config.run import RunConfig
from protocol.config.status import EMBEDDED, OFF, board_address
from protocol.errors import FlowcreditError, LeaseLostError, one_line
from protocol.messages import LearnerState, ScoredGroup, ShardRequest
from protocol.ports import Fleet, ImagesHandle, Metrics
from protocol.sink import StatusSink
from protocol.status import ENDED, TrajectoryRecord

log = logging.getLogger(__name__)
STARTING_S = 5.0
"""Seconds in which the embedded board may start."""
FILE_EVERY_S = 15.0
"""Seconds between two writings of `status.json`."""


class RelayingJournal(Journal, Protocol):
    """A journal whose conditions and events others can listen to."""

    def join(self, sink: StatusSink) -> None:
        """Hand conditions and events on to this one too."""
        ...


class Observed(Observer):
    """One run, seen from outside; an asynchronous context around the whole of it.

    async with Observed(config, run, fleet, journal, stop) as observed:
        await fleet.start()
        observed.begin(start)
        await supervise(..., journal=observed.journal, rest=observed.control.rest, observer=observed)
    """

    def __init__(
        self, config: RunConfig, run: RunFolder, fleet: Fleet, journal: "RelayingJournal", stop: asyncio.Event
    ) -> None:
        self._config = config
        self._run = run
        self._stop = stop
        self.reporter = Reporter(config, name=run.path.resolve().name, lines=run.lines(), fleet=fleet)
        self._fleet = fleet
        self._sink = journal
        journal.join(self.reporter)
        self.control = Control(fleet, self.reporter, journal, stop)
        self._recorder = TrajectoryRecorder(config, fleet.ports, sink=self._recorded)
        self._trackers = Trackers(config, run.path, self.reporter)
        self.journal = ObservedJournal(journal, self.reporter, self._trackers, self._recorder)
        self._server: BoardServer | None = None
        self._publisher: Publisher | None = None
        self._page: PageServer | None = None
        self._patient_until = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Observed":
        logging.getLogger().addHandler(self.reporter)
        with _harmless("the status is not shown"):
            for record in read_records(self._run.trajectories):
                self.reporter.recorded_trajectories(record)
            if (earlier := status_of(self._run.path)) and earlier.status.phase not in ENDED:
                self.control.take_over(earlier.status)
            self._open_board()
        self._go(self._tick)
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reporter = self.reporter
        await self._recorder.finish()
        if error is None:
            reporter.phase = "stopped" if self._stop.is_set() and not self._is_done() else "finished"
        elif isinstance(error, asyncio.CancelledError):
            reporter.phase = "stopped"
        else:
            reporter.phase = "failed"
            if guard := guard_of(error):
                self._sink.condition(f"Guard/{guard}", holds=False, reason="Broken", message=str(error))
            reporter.event(f"the run failed: {one_line(error)}", "error")
        with _harmless("the status of the ended run"):
            self.control.end()
            reporter.event(f"the run has {reporter.phase}" if reporter.phase != "failed" else "the run has ended")
        await end_all(self._tasks)
        with _harmless("the last status"):
            await self._write_file()
            if self._publisher:
                await self._publisher.last_words()
            await asyncio.to_thread(self._close)
        logging.getLogger().removeHandler(reporter)

    def begin(self, start: int) -> None:
        """The fleet is ready; the loop begins at iteration `start`."""
        self.reporter.phase = "running"
        self.reporter.begin(start)

    def begins(self, groups: GroupStream) -> None:
        """Show how many groups wait; after a restart show the metrics without the iterations that are repeated."""
        with _harmless("the groups are not shown"):
            self._recorder.begins(groups)
            if self.reporter.groups is not None:
                self.reporter.rewind(self._run.lines())
            self.reporter.groups = groups

    def rolled_out(self, request: ShardRequest, images: ImagesHandle) -> None:
        """Tell the recorder."""
        with _harmless("a shard is not recorded"):
            self._recorder.rolled_out(request, images)

    def learned(self, iteration: int, batch: Sequence[ScoredGroup]) -> None:
        """Tell the recorder."""
        with _harmless("an update is not recorded"):
            self._recorder.learned(iteration, batch)

    def open_page(self) -> str | None:
        """Serve the run's page on loopback until the run ends; its address, or None when that cannot be."""
        with _harmless("the page is not served"):
            is_shared = self._publisher is not None and self._server is None
            self._page = PageServer(self._run.path, board=board_address(self._config.status) if is_shared else None)
            return f"{self._page.address}#run={self.reporter.run}" if is_shared else self._page.address
        return None

    def _open_board(self) -> None:
        """What is wrong with an address or a server program becomes a condition."""
        try:
            self._connect()
        except (FlowcreditError, OSError) as error:
            self._sink.condition("BoardConnected", holds=False, reason="Unusable", message=str(error))

    def _connect(self) -> None:
        settings = self._config.status
        address = board_address(settings)
        if address == OFF:
            return
        if address == EMBEDDED:
            self._server = BoardServer(self._run.path)
            self._server.start()
            self._patient_until = time.monotonic() + STARTING_S
            address = self._server.url
        self._publisher = Publisher(
            Board(address),
            self.reporter.buffers,
            compose=self.reporter.status,
            on_command=self.control.take,
            on_contact=self._contact,
            keep_s=settings.keep_days * 86400,
            lease=self._run.board_lease,
        )
        self._go(self._publisher.run)

    def _contact(self, trouble: str) -> None:
        """The publisher's newest try to reach the board; nothing is said of a server's first moments."""
        if trouble and time.monotonic() < self._patient_until:
            return
        self._patient_until = 0.0
        if trouble and self._server and not self._server.is_running():
            with _harmless("the embedded board does not come back"):
                self._server.start()
        message = trouble or "the board answers"
        self._sink.condition("BoardConnected", not trouble, "Away" if trouble else "Connected", message)

    def _recorded(self, record: TrajectoryRecord) -> None:
        self.reporter.recorded_trajectories(record)
        self._run.require_writer()
        write_record(self._run.trajectories, record)

    async def _tick(self) -> None:
        heartbeat_s = self._config.status.heartbeat_s
        until_file, filed = 0.0, None
        while True:
            await self._look_after_leases()
            if self._stop.is_set():
                self.reporter.phase = "stopping"
            if self.reporter.phase in ("running", "paused", "stopping"):
                with _harmless("wishes are not looked after"):
                    await self.control.reconcile()
            if self._page:
                with _harmless("the page is not looked after"):
                    self._page.look_after(self._sink)
            until_file -= heartbeat_s
            wished = (dict(self.reporter.desired_sizes), self.reporter.is_pause_requested)
            if until_file <= 0 or wished != filed:
                until_file, filed = FILE_EVERY_S, wished
                await self._write_file()
            await asyncio.sleep(heartbeat_s)

    async def _look_after_leases(self) -> None:
        """Once another process has taken over this one stops: nothing that it still does would be written."""
        try:
            await asyncio.to_thread(self._run.require_writer)
        except LeaseLostError as error:
            self._sink.condition("OneWriter", holds=False, reason="TakenOver", message=str(error))
            self._stop.set()
            return
        lease = self._run.board_lease
        if lease and lease.trouble:
            message = f"the lease of the run folder counts alone: {lease.trouble}"
            self._sink.condition("BoardLease", holds=False, reason="Away", message=message)
        elif lease:
            message = f"held with token {', '.join(map(str, lease.tokens))}"
            self._sink.condition("BoardLease", holds=True, reason="Held", message=message)

    async def _write_file(self) -> None:
        kind, text = "StatusWritten", self.reporter.file_text()
        try:
            await asyncio.to_thread(self._run.require_writer)
            await asyncio.to_thread(write_whole, self._run.path / STATUS, text)
        except LeaseLostError:
            return
        except OSError as error:
            self._sink.condition(kind, holds=False, reason="WriteFailed", message=f"{STATUS}: {error.strerror}")
        else:
            self._sink.condition(kind, holds=True, reason="Written", message=f"{STATUS} is written")

    def _go(self, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            with _harmless("a part of the status service ended"):
                await work()
            message = "a part of the status service ended; run.log says more"
            self._sink.condition("StatusShown", holds=False, reason="Failed", message=message)

        self._tasks.append(asyncio.create_task(guarded()))

    def _is_done(self) -> bool:
        return self.reporter.status().iteration >= self._config.iterations

    def _close(self) -> None:
        self._trackers.close()
        is_taken_over = not self._run.is_writer()
        if self._page:
            self._page.stop(is_taken_over=is_taken_over)
        if self._server:
            self._server.stop(is_taken_over=is_taken_over)


class ObservedJournal:
    """The loop's journal; first the run folder, then whoever looks on."""

    def __init__(
        self, inner: "RelayingJournal", reporter: Reporter, trackers: Trackers, recorder: TrajectoryRecorder
    ) -> None:
        self._inner = inner
        self._reporter = reporter
        self._trackers = trackers
        self._recorder = recorder
        self.condition, self.event = inner.condition, inner.event

    def record(self, iteration: int, metrics: Metrics) -> None:
        """One iteration's numbers."""
        self._inner.record(iteration, metrics)
        with _harmless("an iteration is not shown"):
            self._reporter.staleness = self._recorder.staleness
            values = {"iteration": iteration, **metrics}
            self._reporter.recorded(iteration, values)
            self._trackers.log(iteration, values)

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """One evaluation."""
        self._inner.evaluated(iteration, evaluation)
        with _harmless("an evaluation is not shown"):
            values = evaluation.line(iteration)
            self._reporter.evaluated(iteration, values)
            self._trackers.log(iteration, values)

    def save(self, state: LearnerState) -> None:
        """A checkpoint."""
        self._inner.save(state)
        with _harmless("a checkpoint is not shown"):
            self._reporter.saved(state.iteration)


@contextlib.contextmanager
def _harmless(what: str) -> Iterator[None]:
    """The run goes on whatever happens inside."""
    try:
        yield
    except (FlowcreditError, OSError) as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s", what)
