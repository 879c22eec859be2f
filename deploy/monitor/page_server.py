"""The process that serves a run's page on loopback while the run goes on; if it ends, it is started again.

This process opens the listening socket and hands it to the other one, so that no other program can take the port in
between, and the address stays the same after a restart.
"""

import fcntl
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from deploy.board.child import Child
from deploy.folder.names import TOKEN
from protocol.addresses import BOARD_VARIABLE
from protocol.sink import StatusSink

FIRST_PORT, PORTS = 8420, 50
LEAST_DESCRIPTOR = 20
"""Descriptors below are the watcher's own, see `deploy.board.child`."""
LINGER_S = 1.5
"""Seconds that the process goes on at the run's end if a page is open, which asks once a second and so sees the end."""
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
        self._listener = _listen()
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        where = [] if board else [str(run)]
        socket_of_ours = ["--socket", str(self._listener.fileno()), "--linger", str(LINGER_S)]
        words = ["serve", *where, *socket_of_ours, "--token-file", str(self._token)]
        self._command = [sys.executable, "-m", "flowcredit", *words]
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
        self._listener.close()
        if not is_taken_over:
            self._token.unlink(missing_ok=True)

    def _start(self) -> Child:
        return Child(self._command, variables=self._variables, descriptors=(self._listener.fileno(),))


def _listen() -> socket.socket:
    """Listen on the first free port from `FIRST_PORT`, or on any."""
    for port in (*range(FIRST_PORT, FIRST_PORT + PORTS), 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as listener:
            return socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR))
    raise OSError("no port of 127.0.0.1 is free")
