"""The bounds of a call: its time and its size hold whatever the server sends."""

import itertools
import threading
import zlib
from collections.abc import Iterator

import pytest

from rewards.http.caller import MOST_BYTES, CallError, HttpCaller
from tests.support.rewards.reward_servers import raw_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
MIB = bytes(1024**2)


def dripping_head() -> Iterator[bytes]:
    yield HEAD + b"x: "
    yield from dripping(b"y")


def dripping_body() -> Iterator[bytes]:
    yield HEAD + b"content-length: 100000\r\n\r\n"
    yield from dripping(b" ")


def dripping_name_of_a_gzip() -> Iterator[bytes]:
    """A gzip's header may hold a file's name of any length: nothing is unpacked meanwhile."""
    yield HEAD + b"content-encoding: gzip\r\n" + b"content-length: 100000\r\n\r\n"
    yield b"\x1f\x8b\x08\x08" + bytes(6)
    yield from dripping(b"n")


def dripping(piece: bytes) -> Iterator[bytes]:
    never = threading.Event()
    while not never.wait(0.1):
        yield piece


def endless_body() -> Iterator[bytes]:
    yield CHUNKED
    for _ in itertools.count():
        yield b"100000\r\n" + MIB + b"\r\n"


def small_gzip_of_a_large_body() -> Iterator[bytes]:
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    body = b"".join(packer.compress(MIB) for _ in range(2 * MOST_BYTES // len(MIB))) + packer.flush()
    assert len(body) < MOST_BYTES / 100
    yield HEAD + f"content-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", [dripping_head, dripping_body, dripping_name_of_a_gzip])
def test_a_server_that_drips_is_given_up_at_the_deadline(answer) -> None:
    """The tries are longer than the deadline, which therefore ends the first one."""
    with raw_server(answer) as url, pytest.raises(CallError, match="no whole reply within the deadline of 1 s"):
        HttpCaller(url, timeout_s=3600, tries=3, deadline_s=1.0).call("GET", "/")
    with raw_server(answer) as url, pytest.raises(CallError, match="no whole reply within 0.5 s"):
        HttpCaller(url, timeout_s=0.5, tries=1, deadline_s=3600).call("GET", "/")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", [endless_body, small_gzip_of_a_large_body])
def test_a_reply_that_is_too_large_is_given_up(answer) -> None:
    with raw_server(answer) as url, pytest.raises(CallError, match="a reply may have 16 MiB, sent or unpacked"):
        HttpCaller(url, timeout_s=50, tries=3, deadline_s=55).call("GET", "/")


def test_a_packed_reply_that_is_broken_is_one_line() -> None:
    def broken() -> Iterator[bytes]:
        yield HEAD + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope"

    with raw_server(broken) as url, pytest.raises(CallError, match="the reply cannot be unpacked"):
        HttpCaller(url, timeout_s=20, tries=1, deadline_s=20).call("GET", "/")
