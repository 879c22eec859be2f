"""Connections that send no request, or only slowly: they end in time, keep nobody away and fill no log."""

import asyncio
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx2
import pytest
from fastapi import FastAPI, Request

from deploy.api.connections import BoundedConnection, Sparing
from tests.support.paths import ROOT
from tests.support.rewards.reward_servers import uvicorn_of

FILES = 128
"""Files that the server of these tests may open."""


@contextmanager
def app_with(**bounds: float) -> Iterator[tuple[str, int]]:
    """Host and port of a service with these bounds; it answers with the length of a body."""
    app = FastAPI()

    @app.post("/")
    async def length(request: Request) -> int:
        return len(await request.body())

    with uvicorn_of(app, http=type("Quick", (BoundedConnection,), bounds)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def drip(connection: socket.socket, piece: bytes, ends: Callable[[], bool]) -> None:
    while not ends():
        try:
            connection.sendall(piece)
        except OSError:
            return
        time.sleep(0.05)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closes the connection; waits for it."""
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"],
    ids=["nothing", "head", "body"],
)
def test_a_request_that_does_not_arrive_is_given_up_although_it_drips(begun: bytes) -> None:
    with app_with(head_s=0.5, body_s=0.5) as address, socket.create_connection(address) as connection:
        connection.sendall(begun)
        over = threading.Event()
        if begun:
            threading.Thread(target=drip, args=(connection, b"x", over.is_set), daemon=True).start()
        assert is_closed(connection)
        over.set()


def test_a_second_request_must_arrive_in_time_too() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
    with app_with(head_s=0.5) as address, socket.create_connection(address) as connection:
        connection.sendall(head + b"ab")
        said = b""
        while not said.endswith(b"\r\n\r\n2"):
            said += connection.recv(1000)
        over = threading.Event()
        threading.Thread(target=drip, args=(connection, b"P", over.is_set), daemon=True).start()
        assert is_closed(connection)
        over.set()


def test_a_slow_answer_is_waited_for() -> None:
    app = FastAPI()

    @app.get("/")
    def slow() -> str:
        time.sleep(1.0)
        return "done"

    with uvicorn_of(app, http=type("Quick", (BoundedConnection,), {"head_s": 0.2, "body_s": 0.2})) as url:
        assert httpx2.get(url, timeout=30).json() == "done"


def test_silent_connections_keep_nobody_away_and_the_log_short(tmp_path) -> None:
    """Ten times as many as the server may open files."""
    words = [sys.executable, "-m", "flowcredit", "serve", str(tmp_path), "--port", "0"]
    with (tmp_path / "log").open("w") as log, ExitStack() as held:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1].rstrip("/")
            host, port = address.removeprefix("http://").split(":")
            for _ in range(10):
                for _ in range(FILES):
                    held.enter_context(socket.create_connection((host, int(port)), timeout=30))
                assert httpx2.get(f"{address}/healthz", timeout=30).status_code == 200
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "log").stat().st_size < 10_000


def test_a_message_is_logged_once_in_a_while_with_the_number_of_the_others() -> None:
    now = 100.0
    sparing = Sparing(lambda: now)

    def said(text: str, *args: object) -> str | None:
        record = logging.LogRecord("log", logging.WARNING, "", 0, text, args, None)
        return record.getMessage() if sparing.filter(record) else None

    assert said("bad %s", "a") == "bad a"
    assert [said("bad %s", "b") for _ in range(5)] == [None] * 5
    assert said("another") == "another"
    now += 11
    assert said("bad %s", "c") == "bad c (and 5 times more)"
    assert said("bad %s", "d") is None


def test_a_request_that_the_ending_server_cancels_is_not_logged_and_an_error_is() -> None:
    def is_logged(error: BaseException) -> bool:
        return Sparing().filter(
            logging.LogRecord("log", logging.ERROR, "", 0, "failed", (), (type(error), error, None))
        )

    assert not is_logged(asyncio.CancelledError())
    assert is_logged(ValueError("another"))
