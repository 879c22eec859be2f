"""Boards to test against: the embedded Valkey and, where it is installed, Debian's Redis with a password."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from tenacity import retry, stop_after_delay, wait_fixed

from deploy.board.board import Board
from deploy.board.embedded import BoardServer
from protocol.errors import BoardError
from tests.support.programs import need
from tests.support.services.serving import free_port
from tests.support.waiting import PATIENCE_S, until

KINDS = ("valkey", "redis with a password")
PASSWORD = "secret-word"


@contextmanager
def board_of(kind: str, folder: Path) -> Iterator[str]:
    """The address of a board that lives as long as the context."""
    if kind == "valkey":
        server = BoardServer(folder)
        server.start()
        try:
            yield server.url
        finally:
            server.stop()
        return
    program = need("redis-server")
    path = folder / "r.sock"
    words = [program, "--port", "0", "--unixsocket", str(path), "--requirepass", PASSWORD, "--save", ""]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    yield f"unix://:{PASSWORD}@{path}"
    process.kill()
    process.wait()


@contextmanager
def redis_over_tls(folder: Path) -> Iterator[str]:
    """The address of a Redis that takes TLS connections only; `other.pem` is an authority that did not sign."""
    program = need("redis-server")
    authority, port = trustme.CA(), free_port()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    settings = {
        "port": "0",
        "tls-port": str(port),
        "bind": "127.0.0.1",
        "tls-cert-file": "certificate.pem",
        "tls-key-file": "key.pem",
        "tls-ca-cert-file": "authority.pem",
        "tls-auth-clients": "no",
        "requirepass": PASSWORD,
        "save": "",
    }
    words = [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        connect = retry(stop=stop_after_delay(PATIENCE_S), wait=wait_fixed(0.1), reraise=True)(socket.create_connection)
        connect(("127.0.0.1", port)).close()
        yield f"rediss://:{PASSWORD}@localhost:{port}/0?ssl_ca_certs={folder / 'authority.pem'}"
    finally:
        process.kill()
        process.wait()


def answers(client: Redis) -> bool:
    """Whether a board answers already."""
    try:
        return bool(client.ping())
    except Exception:  # noqa: BLE001  whatever a server says while it starts
        return False


async def answering(board: Board) -> None:
    """Returns when the board's server has started."""

    async def answers() -> bool:
        try:
            await board.ping()
        except BoardError:
            return False
        return True

    await until(answers)


async def end_server(url: str) -> None:
    """End the server of a board; returns when it is gone."""
    client = AsyncRedis.from_url(url)
    await client.shutdown(nosave=True)
    await client.aclose()
