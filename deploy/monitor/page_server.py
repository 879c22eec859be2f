"""The process that serves a run's page on loopback while the run goes on; if it ends, it is started again."""

import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from deploy.board.child import Child
from deploy.folder.names import TOKEN
from protocol.config.status import BOARD_VARIABLE
from protocol.sink import StatusSink

FIRST_PORT, PORTS = 8420, 50
EVERY_S = 15.0
"""Seconds between two checks of the process, and so between two starts."""


class PageServer:
    """Made, checked and stopped by the run's process.

    page = PageServer(run_folder)
    page.address
    page.restart_if_ended(sink)
    page.stop()
    """

    def __init__(self, run: Path, *, board: str | None = None) -> None:
        """
        Args:
            run: the run folder, whose page is served and which takes the token.
            board: address of a shared board, which is served instead.

        Raises:
            OSError: the token cannot be written or the process not be started.
        """
        self._token = run / TOKEN
        descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}/"
        where = [] if board else [str(run)]
        words = ["serve", *where, "--port", str(port), "--token-file", str(self._token)]
        self._command = [sys.executable, "-m", "deploy", *words]
        self._variables = {BOARD_VARIABLE: board} if board else {}  # an address may hold a password: no argument
        self._child = self._start()
        self._checked = time.monotonic()

    def restart_if_ended(self, sink: StatusSink) -> None:
        """Start the process again if it has ended; checks at most every `EVERY_S`."""
        now = time.monotonic()
        if now - self._checked < EVERY_S:
            return
        self._checked = now
        if self._child.is_running():
            sink.condition("PageServed", holds=True, reason="Serving", message=f"the page is at {self.address}")
            return
        message = f"the server of the page at {self.address} has ended and is started again"
        sink.condition("PageServed", holds=False, reason="Ended", message=message)
        self._child = self._start()

    def stop(self, *, is_taken_over: bool = False) -> None:
        """End the process and remove its token, unless another process has taken the run over and written its own."""
        self._child.stop()
        if not is_taken_over:
            self._token.unlink(missing_ok=True)

    def _start(self) -> Child:
        return Child(self._command, variables=self._variables)


def _free_port() -> int:
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
