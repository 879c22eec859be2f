"""The process that serves a run's page on loopback during the run; if it ends, it is started again.

The run's process opens the listening socket and passes it to the server's process: so no other program can take the
port in between, and the address stays the same after a restart.
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
from protocol.ground.addresses import BOARD_VARIABLE
from protocol.sink import StatusSink

FIRST_PORT, PORTS = 8420, 50
LEAST_DESCRIPTOR = 20
"""Lowest descriptor for the socket: the watcher uses the ones below, see `deploy.board.child`."""
LINGER_S = 2.5
"""Seconds that the server outlives the run if a page is open: it asks a second after each answer, and so it can show
the end, also on a busy machine. Less than the time after which a child is killed (`deploy.board.child`)."""
EVERY_S = 15.0
"""Seconds between two checks of the process, and therefore between two starts."""


class PageServer:
    """The server of a run's page; the run's process starts, checks and stops it.

    page = PageServer(run_folder)
    page.address
    page.restart_if_ended(sink)
    page.stop()
    """

    def __init__(self, run: Path, *, board: str | None = None) -> None:
        """
        Args:
            run: the run folder; its page is served, and the token is written there.
            board: address of a shared board, whose page is served instead.

        Raises:
            OSError: the token cannot be written or the process cannot be started.
        """
        self._token = run / TOKEN
        descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
        self._listener = _listen()
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        where = [] if board else [str(run)]
        listening = ["--socket", str(self._listener.fileno()), "--linger", str(LINGER_S)]
        words = ["serve", *where, *listening, "--token-file", str(self._token)]
        self._command = [sys.executable, "-m", "flowcredit", *words]
        self._variables = {BOARD_VARIABLE: board} if board else {}  # not an argument: an address may hold a password
        self._child = self._start()
        self._checked = time.monotonic()

    def restart_if_ended(self, sink: StatusSink) -> None:
        """Start the process again if it has ended; check at most every `EVERY_S` seconds."""
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
        """End the process and remove its token, unless another process has taken the run over and written a new one."""
        self._child.stop()
        self._listener.close()
        if not is_taken_over:
            self._token.unlink(missing_ok=True)

    def _start(self) -> Child:
        return Child(self._command, variables=self._variables, descriptors=(self._listener.fileno(),))


def _listen() -> socket.socket:
    """Listen on the first free port from `FIRST_PORT` on, or else on any port."""
    for port in (*range(FIRST_PORT, FIRST_PORT + PORTS), 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as listener:
            return socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR))
    raise OSError("no port of 127.0.0.1 is free")
