"""The process that serves a run's page on loopback while the run goes; one that ends is started again."""

import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from deploy.child import Child
from protocol.sink import StatusSink

TOKEN_FILE = "control.token"
FIRST_PORT, PORTS = 8420, 50
EVERY_S = 15.0
"""Seconds between two looks after the process, and so between two starts."""


class PageServer:
    """Made, looked after and stopped by the run's process.

    page = PageServer(run_folder)
    page.address
    page.look_after(sink)
    page.stop()
    """

    def __init__(self, run: Path) -> None:
        """Raises OSError when the token cannot be written or the process not be started."""
        self._token = run / TOKEN_FILE
        descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}/"
        words = ["serve", str(run), "--port", str(port), "--token-file", str(self._token)]
        self._command = [sys.executable, "-m", "deploy", *words]
        self._child = Child(self._command)
        self._looked = time.monotonic()

    def look_after(self, sink: StatusSink) -> None:
        """Start a process that has ended once more; at most every `EVERY_S`."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return
        self._looked = now
        if self._child.is_running():
            sink.condition("PageServed", holds=True, reason="Serving", message=f"the page is at {self.address}")
            return
        message = f"the server of the page at {self.address} has ended and is started again"
        sink.condition("PageServed", holds=False, reason="Ended", message=message)
        self._child = Child(self._command)

    def stop(self) -> None:
        """End it; its token is of no more use."""
        self._child.stop()
        self._token.unlink(missing_ok=True)


def _free_port() -> int:
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
