"""The monitoring and control of a run in progress: status, board, trackers, recorded trajectories, commands, page.

**Monitoring is off the critical path.** Any failure in it becomes a condition or a line in the log, not an exception.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from deploy.folder.metric_file import outline_of, page_of
from deploy.folder.names import METRICS
from deploy.folder.read import status_of
from deploy.folder.run_folder import RunFolder
from deploy.monitor.board_link import BoardLink
from deploy.monitor.control import Control
from deploy.monitor.heartbeat import Heartbeat
from deploy.monitor.journal import RUN_FAILED, RunJournal, harmless
from deploy.monitor.page_server import PageServer
from deploy.monitor.reporter import Reporter
from deploy.monitor.summary import line_of
from deploy.monitor.trackers import Trackers
from deploy.monitor.trajectories import TrajectoryRecorder, read_records, write_record
from learner.loop.groups import Observer
from learner.loop.guards import guard_of
from learner.loop.stopping import end_all
from learner.loop.stream import GroupStream
from protocol.errors import one_line
from protocol.messages import ScoredGroup, ShardRequest
from protocol.ports import Fleet, ImagesHandle
from protocol.status import ENDED, MetricLine, TrajectoryRecord

log = logging.getLogger(__name__)


class Observed(Observer):
    """The monitoring of one run: an asynchronous context around the whole run.

    async with Observed(run, fleet, journal, stop) as observed:
        await fleet.start()
        observed.reporter.begin(start)
        await supervise(..., journal=journal, between=observed.control.between, observer=observed)
    """

    def __init__(self, run: RunFolder, fleet: Fleet, journal: RunJournal, stop: asyncio.Event) -> None:
        """
        Args:
            run: folder of the run, held by this process.
            stop: event that ends the run after the update in progress.
        """
        self._run = run
        self._stop = stop
        self._journal = journal
        self._recorder = TrajectoryRecorder(run.config, fleet.ports, sink=self._write_record)
        name = run.path.resolve().name
        self.reporter = Reporter(run.config, name=name, lines=run.lines(), fleet=fleet, earlier=self._earlier)
        journal.join(self.reporter)
        self._trackers = Trackers(run.config, run.path, journal)
        journal.join(self._trackers)
        self.control = Control(fleet, self.reporter, journal, stop)
        self.heartbeat = Heartbeat(run, self.reporter, self.control, journal, stop)
        self.board: BoardLink | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Observed":
        await asyncio.to_thread(self._trackers.wait_for_start)
        logging.getLogger().addHandler(self.reporter)
        with harmless("earlier records and commands are not taken over"):
            for record in read_records(self._run.trajectories):
                self.reporter.buffers.add_record(record)
            if (earlier := status_of(self._run.path)) and earlier.status.phase not in ENDED:
                self.control.take_over(earlier.status)
        with harmless("the status is not shown"):
            self.board = BoardLink(self._run, self.reporter, self.control, self._journal)
            self.run_beside(self.board.run)
        self.run_beside(self.heartbeat.run)
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reporter = self.reporter
        await self._recorder.finish()
        if error is None:
            is_done = reporter.status().iteration >= self._run.config.iterations
            reporter.phase = "stopped" if self._stop.is_set() and not is_done else "finished"
        elif isinstance(error, asyncio.CancelledError):
            reporter.phase = "stopped"
        else:
            reporter.phase = "failed"
            if guard := guard_of(error):
                self._journal.condition(f"Guard/{guard}", holds=False, reason=RUN_FAILED, message=str(error))
            reporter.event(f"the run failed: {one_line(error)}", "error")
        with harmless("the status of the ended run"):
            self.control.end(is_saved=reporter.is_saved)
            reporter.event(f"the run has {reporter.phase}" if reporter.phase != "failed" else "the run has ended")
        await end_all(self._tasks)
        with harmless("the last status"):
            await self.heartbeat.write_status()
            if self.board:
                await self.board.publish_end()
            await asyncio.to_thread(self._close)
        logging.getLogger().removeHandler(reporter)

    def _earlier(self, since: int, limit: int) -> list[MetricLine]:
        path = self._run.path / METRICS
        return [line_of(number, values) for number, values in page_of(path, outline_of(path), since=since, limit=limit)]

    def begins(self, groups: GroupStream) -> None:
        """Show how many groups wait; after a restart, drop the metrics of the iterations that are repeated."""
        with harmless("the groups are not shown"):
            self._recorder.begins(groups)
            if self.reporter.groups is not None:
                self.reporter.rewind(self._run.lines())
            self.reporter.groups = groups

    def rolled_out(self, request: ShardRequest, images: ImagesHandle) -> None:
        with harmless("a shard is not recorded"):
            self._recorder.rolled_out(request, images)

    def learned(self, iteration: int, batch: Sequence[ScoredGroup]) -> None:
        with harmless("an update is not recorded"):
            self._recorder.learned(iteration, batch)
            self.reporter.staleness = self._recorder.staleness

    def open_page(self) -> str | None:
        """Serve the run's page on loopback until the run ends; return its address, or None if that fails."""
        with harmless("the page is not served"):
            shared = self.board.shared_address if self.board else None
            self.heartbeat.page = PageServer(self._run.path, board=shared)
            return f"{self.heartbeat.page.address}#run={self.reporter.run}" if shared else self.heartbeat.page.address
        return None

    def run_beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in a task until the run ends; its failure becomes a condition."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:
                log.exception("a part of the monitoring ended")
                message = f"a part of the monitoring ended: {one_line(error)}; run.log has the traceback"
                self._journal.condition("StatusShown", holds=False, reason="Failed", message=message)

        self._tasks.append(asyncio.create_task(guarded()))

    async def _write_record(self, record: TrajectoryRecord) -> None:
        self.reporter.buffers.add_record(record)
        self._trackers.recorded_trajectories(record)
        await asyncio.to_thread(self._run.require_writer)
        await asyncio.to_thread(write_record, self._run.trajectories, record)

    def _close(self) -> None:
        self._trackers.close()
        is_taken_over = not self._run.is_writer()
        if self.heartbeat.page:
            self.heartbeat.page.stop(is_taken_over=is_taken_over)
        if self.board:
            self.board.stop(is_taken_over=is_taken_over)
