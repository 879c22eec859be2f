"""The link between a run and its status board: an embedded server or a given address, and the publisher."""

import time
from pathlib import Path

from deploy.board.board import Board
from deploy.board.embedded import BoardServer
from deploy.board.publisher import Publisher
from deploy.folder.run_folder import RunFolder
from deploy.monitor.control import Control
from deploy.monitor.journal import harmless
from deploy.monitor.reporter import Reporter
from protocol.config.status import board_address
from protocol.errors import FlowcreditError
from protocol.ground.addresses import EMBEDDED, OFF
from protocol.sink import StatusSink

STARTING_S = 5.0
"""Seconds that the embedded server may take to start before a missing answer becomes a condition."""


class BoardLink:
    """Publishes a run's status to its board; states the condition `BoardConnected`.

    link = BoardLink(run, reporter, control, sink)
    await link.run()                  # until cancelled
    await link.publish_end()
    link.stop(is_taken_over=False)
    """

    def __init__(self, run: RunFolder, reporter: Reporter, control: Control, sink: StatusSink) -> None:
        """
        Args:
            run: the run folder. Its config names the board, an embedded server has its socket there, and nothing is
                published while another process holds its lease on the board.
        """
        self._sink = sink
        self.server: BoardServer | None = None
        self._publisher: Publisher | None = None
        self._patient_until = 0.0
        self._address = board_address(run.config.status)
        if self._address == OFF:
            return
        try:
            self._publisher = Publisher(
                Board(self._start_server(run.path) if self._address == EMBEDDED else self._address),
                reporter.buffers,
                compose=reporter.status,
                on_command=control.take,
                on_leftover=control.refuse,
                on_contact=self._note_contact,
                keep_s=run.config.status.keep_days * 86400,
                lease=run.board_lease,
            )
        except (FlowcreditError, OSError) as error:
            sink.condition("BoardConnected", holds=False, reason="Unusable", message=str(error))

    @property
    def shared_address(self) -> str | None:
        """Return the address of a board that other runs may use too; None if there is none."""
        return self._address if self._publisher and not self.server else None

    async def run(self) -> None:
        """Publish until cancelled; without a board, return at once."""
        if self._publisher:
            await self._publisher.run()

    async def publish_end(self) -> None:
        """Publish a last time, so that the board shows how the run ended."""
        if self._publisher:
            await self._publisher.finish()

    def stop(self, *, is_taken_over: bool) -> None:
        """Stop the embedded server of this process; one of another process stays."""
        if self.server:
            self.server.stop(is_taken_over=is_taken_over)

    def _start_server(self, run: Path) -> str:
        self.server = BoardServer(run)
        self.server.start()
        self._patient_until = time.monotonic() + STARTING_S
        return self.server.url

    def _note_contact(self, trouble: str) -> None:
        """State whether the newest exchange worked; start an embedded server again if it has ended."""
        if trouble and time.monotonic() < self._patient_until:
            return
        self._patient_until = 0.0
        if trouble and self.server and not self.server.is_running():
            with harmless("the embedded board cannot be started again"):
                self.server.start()
        message = trouble or "the board answers"
        self._sink.condition("BoardConnected", not trouble, "Away" if trouble else "Connected", message)
