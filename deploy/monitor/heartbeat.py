"""The checks of a run's process with every heartbeat: leases, pool sizes, the page's server and `status.json`."""

import asyncio

from deploy.folder.names import STATUS
from deploy.folder.run_folder import RunFolder
from deploy.monitor.control import Control
from deploy.monitor.journal import harmless
from deploy.monitor.page_server import PageServer
from deploy.monitor.reporter import Reporter
from protocol.errors import LeaseLostError, reason_of
from protocol.ground.files import write_whole
from protocol.sink import StatusSink
from protocol.status import ENDED

FILE_EVERY_S = 15.0
"""Seconds between two writes of `status.json`, unless desired sizes or a pause change."""


class Heartbeat:
    """The heartbeat of one run; `page` is set while the run serves a page.

    heartbeat = Heartbeat(run, reporter, control, sink, stop)
    await heartbeat.run()             # until cancelled
    await heartbeat.write_status()
    """

    def __init__(
        self, run: RunFolder, reporter: Reporter, control: Control, sink: StatusSink, stop: asyncio.Event
    ) -> None:
        """
        Args:
            run: the run folder; its leases are checked, and `status.json` is written there.
            control: reconciles pool sizes with the desired ones.
            stop: set here when another process has taken the run over.
        """
        self.page: PageServer | None = None
        self._run = run
        self._reporter = reporter
        self._control = control
        self._sink = sink
        self._stop = stop

    async def run(self) -> None:
        """Check everything each `status.heartbeat_s` seconds, until cancelled."""
        every_s = self._run.config.status.heartbeat_s
        until_write, written = 0.0, None
        while True:
            await self._check_leases()
            if self._stop.is_set():
                self._reporter.phase = "stopping"
            if self._reporter.phase not in ENDED:
                with harmless("pool sizes are not reconciled"):
                    await self._control.reconcile()
            if self.page:
                with harmless("the page's server is not checked"):
                    self.page.restart_if_ended(self._sink)
            until_write -= every_s
            desired = (dict(self._reporter.desired_sizes), self._reporter.is_pause_requested)
            if until_write <= 0 or desired != written:
                until_write, written = FILE_EVERY_S, desired
                await self.write_status()
            await asyncio.sleep(every_s)

    async def write_status(self) -> None:
        """Write `status.json`; a failure becomes a condition."""
        kind, text = "StatusWritten", self._reporter.file_text()
        try:
            await asyncio.to_thread(self._run.require_writer)
            await asyncio.to_thread(write_whole, self._run.path / STATUS, text)
        except LeaseLostError:
            return
        except OSError as error:
            self._sink.condition(kind, holds=False, reason="WriteFailed", message=f"{STATUS}: {reason_of(error)}")
        else:
            self._sink.condition(kind, holds=True, reason="Written", message=f"{STATUS} is written")

    async def _check_leases(self) -> None:
        """Stop the run if another process has taken over: this one may not write results any more."""
        try:
            await asyncio.to_thread(self._run.require_writer)
        except LeaseLostError as error:
            self._sink.condition("OneWriter", holds=False, reason="TakenOver", message=str(error))
            self._stop.set()
            return
        lease = self._run.board_lease
        if lease and lease.trouble:
            message = f"only the lease of the run folder protects the run: {lease.trouble}"
            self._sink.condition("BoardLease", holds=False, reason="Away", message=message)
        elif lease:
            message = f"held with token {', '.join(map(str, lease.tokens))}"
            self._sink.condition("BoardLease", holds=True, reason="Held", message=message)
