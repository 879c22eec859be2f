"""Connections that send no request, or only slowly: they end in time, keep nobody away and fill no log."""

import asyncio
import logging
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from deploy.api.app import make_app
from deploy.api.auth import Access
from deploy.api.connections import BoundedConnection, Sparing
from deploy.api.folder_source import FolderSource
from deploy.api.middleware import PEER_BODIES
from deploy.api.rewards import make_app as make_reward_app
from tests.support.paths import ROOT
from tests.support.rewards.reward_servers import reward_service
from tests.support.services.serving import TOKEN
from tests.support.virtual_time import run_at_once
from tests.support.waiting import PATIENCE_S

FILES = 128
"""Files that the server of these tests may open."""


class Wire(asyncio.Transport):
    """The transport of a connection in memory: what the server said on it, and whether the server closed it."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.is_gone = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += data

    def abort(self) -> None:
        self.is_gone = True

    def close(self) -> None:
        self.abort()

    def is_closing(self) -> bool:
        return self.is_gone

    def pause_reading(self) -> None:
        """Nothing comes but what a test sends."""

    def resume_reading(self) -> None:
        """The same."""


def connected(app: object) -> tuple[BoundedConnection, Wire]:
    """A connection to an ASGI app, in the running loop."""
    config = uvicorn.Config(app, log_level="error", lifespan="off")  # type: ignore[arg-type]
    connection, wire = BoundedConnection(config, ServerState(), {}), Wire()
    connection.connection_made(wire)
    return connection, wire


async def seconds_until_closed(connection: BoundedConnection, wire: Wire, piece: bytes) -> float:
    """How long the server keeps the connection although a piece of a request comes every second."""
    now = asyncio.get_running_loop().time
    began = now()
    while not wire.is_gone:
        assert now() - began < 1000
        if piece:
            connection.data_received(piece)
        await asyncio.sleep(1.0)
    return now() - began


async def length_of_body(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


APP = Starlette(routes=[Route("/", length_of_body, methods=["POST"])])


@pytest.mark.parametrize(
    ("begun", "seconds"),
    [
        (b"", BoundedConnection.head_s),
        (b"POST / HTTP/1.1\r\nX: ", BoundedConnection.head_s),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", BoundedConnection.head_s),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 67108864\r\n\r\n", BoundedConnection.head_s + 64),
        (b"GET /no HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", BoundedConnection.head_s),
    ],
    ids=["nothing", "head", "body", "large body", "body that nobody reads"],
)
def test_a_request_that_does_not_arrive_is_given_up_although_it_drips(begun: bytes, seconds: float) -> None:
    async def scenario() -> float:
        connection, wire = connected(APP)
        if begun:
            connection.data_received(begun)
        return await seconds_until_closed(connection, wire, b"x" if begun else b"")

    assert run_at_once(scenario()) == pytest.approx(seconds, abs=1.5)


def test_a_second_request_must_arrive_in_time_too() -> None:
    async def scenario() -> float:
        connection, wire = connected(APP)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab")
        await asyncio.sleep(1.0)
        assert wire.said.endswith(b"\r\n\r\n2")
        return await seconds_until_closed(connection, wire, b"P")

    assert run_at_once(scenario()) == pytest.approx(BoundedConnection.head_s, abs=1.5)


def test_a_slow_answer_is_waited_for() -> None:
    async def slow(_: Request) -> PlainTextResponse:
        await asyncio.sleep(3600.0)
        return PlainTextResponse("done")

    async def scenario() -> bytes:
        connection, wire = connected(Starlette(routes=[Route("/", slow)]))
        connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.sleep(3599.0)
        assert not wire.is_gone and not wire.said
        await asyncio.sleep(2.0)
        return wire.said

    assert run_at_once(scenario()).endswith(b"done")


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


def slow_body(url: str, path: str, *headers: str) -> socket.socket:
    """A connection that announces a body and sends one byte of it."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 4000", *headers)
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n{").encode())
    return connection


@pytest.mark.parametrize(
    ("service", "path", "health", "authorisation"),
    [
        ("status", "/runs/a/commands", "/healthz", ()),
        ("status", "/runs/a/commands", "/healthz", (f"Authorization: Bearer {TOKEN}",)),
        ("status", "/healthz", "/healthz", ()),
        ("rewards", "/v1/score", "/v1/health", (f"Authorization: Bearer {TOKEN}",)),
    ],
)
def test_a_peer_with_600_slow_bodies_keeps_nobody_away(service, path, health, authorisation, tmp_path) -> None:
    access = Access(host="127.0.0.1", token=TOKEN)
    app = make_app(FolderSource(tmp_path), access) if service == "status" else make_reward_app({}, access)
    with reward_service(app) as url, ExitStack() as held:  # the connections end first: a server waits for them
        for _ in range(600):
            held.enter_context(slow_body(url, path, *authorisation))
        seconds = []
        for _ in range(3):
            began = time.monotonic()
            assert httpx2.get(url + health, timeout=PATIENCE_S).status_code == 200
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 1.0, "the machine may be busy"


def test_the_token_is_checked_before_a_body_is_read(tmp_path) -> None:
    app = make_app(FolderSource(tmp_path), Access(host="127.0.0.1", token=TOKEN))
    with reward_service(app) as url, slow_body(url, "/runs/a/commands") as connection:
        assert b" 401 " in connection.recv(100)


@pytest.mark.parametrize("proxies", [(), ("127.0.0.1",)], ids=["no proxy is named", "a proxy is named"])
def test_bodies_of_a_client_have_a_bound_and_only_a_named_proxy_tells_who_it_is(proxies, tmp_path) -> None:
    """`PEER_BODIES` bodies of one client, then one of another."""
    app = make_app(FolderSource(tmp_path), Access(host="127.0.0.1", token=TOKEN))
    words = ("/runs/a/commands", f"Authorization: Bearer {TOKEN}")
    with reward_service(app, proxies=proxies) as url, ExitStack() as held:

        def begun(client: str) -> socket.socket:
            return held.enter_context(slow_body(url, *words, f"X-Forwarded-For: {client}"))

        first = begun("10.0.0.1")
        for _ in range(PEER_BODIES - 1):
            begun("10.0.0.1")
        begun("10.0.0.2")
        first.settimeout(1.0)
        if proxies:
            with pytest.raises(TimeoutError):
                first.recv(100)
            begun("10.0.0.1")
            first.settimeout(PATIENCE_S)
        assert b" 503 " in first.recv(100)


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
