"""A board that asks for a password over TLS, its certificate signed by an authority of one's own."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import trustme

from deploy.board.board import Board
from protocol.config.run import RunConfig
from protocol.errors import BoardError, ConfigError
from tests.deploy.api.test_app import free_port, serve
from tests.deploy.monitor.test_observe import Redness, go, left_behind
from tests.support.paths import ROOT

WORD = "secret-word"


@contextmanager
def redis_over_tls(folder: Path) -> Iterator[str]:
    """The address of a Redis that takes TLS connections only; `other.pem` is an authority that did not sign."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
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
        "requirepass": WORD,
        "save": "",
    }
    words = [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        yield f"rediss://:{WORD}@localhost:{port}/0?ssl_ca_certs={folder / 'authority.pem'}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_over_tls(tmp_path_factory.mktemp("redis")) as found:
        yield found


def complaint(url: str) -> str:
    """What is said of an address; AssertionError when the board answers."""

    async def ping() -> str:
        board, until = Board(url), time.monotonic() + 20
        while True:
            try:
                await board.ping()
            except BoardError as error:
                if "refused" in str(error) and time.monotonic() < until:
                    await asyncio.sleep(0.1)
                    continue
                return str(error)
            finally:
                await board.close()
            raise AssertionError(f"{url} answers")

    return asyncio.run(ping())


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("authority.pem", "other.pem", "and the CA's file with ?ssl_ca_certs=FILE"),
        ("localhost", "127.0.0.1", "name the host as its certificate does"),
        (WORD, "another-word", "invalid username-password pair"),
        (f":{WORD}@", "", "it wants a password"),
    ],
)
def test_what_is_wrong_with_a_connection_is_one_line_without_the_password(url, right, wrong, message):
    said = complaint(url.replace(right, wrong))
    assert message in said
    assert "\n" not in said
    assert WORD not in said


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("authority.pem", "missing.pem", "ssl_ca_certs in the board's address must be the CA's file, got /"),
        ("ssl_ca_certs", "ssl_ca_file", "got an unexpected keyword argument 'ssl_ca_file'"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(url, right, wrong, message):
    with pytest.raises(ConfigError, match=message):
        Board(url.replace(right, wrong))


def test_a_run_its_server_and_the_command_line_meet_on_a_board_over_tls(
    url, tiny_config: Callable[..., RunConfig], tmp_path, monkeypatch
):
    monkeypatch.setenv("FLOWCREDIT_BOARD", url)
    rewards = {"redness": {"scorer": f"{Redness.__module__}:Redness"}}
    go(tiny_config(iterations=3, rewards=rewards, status={"heartbeat_s": 0.05}), tmp_path / "secured", slow_s=0.2)
    held = {condition.type: condition.status for condition in left_behind(tmp_path / "secured").conditions}
    assert held["BoardConnected"] == "True"
    written = [path for path in (tmp_path / "secured").rglob("*") if path.is_file()]
    assert not [path for path in written if WORD.encode() in path.read_bytes()]

    process, address = serve(url)
    answer = httpx2.get(f"{address}/runs/secured").json()
    assert (answer["phase"], answer["iteration"]) == ("finished", 3)
    assert len(httpx2.get(f"{address}/runs/secured/metrics").json()) == 5
    process.terminate()
    process.wait(10)

    def status(board: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "deploy", "status", str(tmp_path / "secured")]
        environment = os.environ | {"FLOWCREDIT_BOARD": board}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    assert "finished" in status(url).stdout
    refused = status(url.replace("authority.pem", "other.pem"))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
