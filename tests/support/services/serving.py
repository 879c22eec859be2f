"""`flowcredit serve` as a process of its own."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.warm.command import Process, start_python

TOKEN = "a-token-of-this-test-0123"
AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
Serve = Callable[..., tuple[Process, str]]
"""`serve(where, *words, token=TOKEN)`: the process and its address."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(where: str, *words: str, token: str | None = TOKEN, port: int | None = None) -> tuple[Process, str]:
    """Start a server and wait until it answers; the process and its address, without a slash at the end."""
    environment = {key: value for key, value in os.environ.items() if key != "FLOWCREDIT_TOKEN"}
    if token:
        environment["FLOWCREDIT_TOKEN"] = token
    words = ("-m", "flowcredit", "serve", where, "--port", str(port or 0), *words)
    process = start_python(*words, environment=environment)
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said.startswith("page"):
        process.kill()
        raise AssertionError(said + process.stdout.read())
    return process, said.split()[-1].rstrip("/")


@contextmanager
def servers() -> Iterator[Serve]:
    """Start servers that end with the context at the latest."""
    started: list[Process] = []

    def serve(where: str, *words: str, token: str | None = TOKEN) -> tuple[Process, str]:
        process, address = start_server(where, *words, token=token)
        started.append(process)
        return process, address

    try:
        yield serve
    finally:
        for process in started:
            process.kill()
            process.wait()
