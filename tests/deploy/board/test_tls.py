"""A board that asks for a password over TLS, its certificate signed by an authority of one's own."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx2
import pytest

from deploy.board.board import Board
from protocol.config.run import RunConfig
from protocol.errors import BoardError, ConfigError
from tests.support.paths import ROOT
from tests.support.runs.watched import REDNESS, Scene, go, left_behind
from tests.support.services.boards import PASSWORD, redis_over_tls
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_over_tls(tmp_path_factory.mktemp("redis")) as found:
        yield found


def complaint(url: str) -> str:
    """What is said of an address; AssertionError when the board answers."""

    async def ping() -> str:
        board = Board(url)
        try:
            await board.ping()
        except BoardError as error:
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
        (PASSWORD, "another-word", "invalid username-password pair"),
        (f":{PASSWORD}@", "", "it wants a password"),
    ],
)
def test_what_is_wrong_with_a_connection_is_one_line_without_the_password(url, right, wrong, message):
    said = complaint(url.replace(right, wrong))
    assert message in said
    assert "\n" not in said
    assert PASSWORD not in said


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
    url, tiny_config: Callable[..., RunConfig], serve, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLOWCREDIT_BOARD", url)

    async def meets(scene: Scene) -> None:
        def is_connected() -> bool:
            held = {condition.type: condition.status for condition in scene.observed.reporter.status().conditions}
            return held["BoardConnected"] == "True"

        await until(is_connected)

    config = tiny_config(iterations=3, rewards=REDNESS, status={"heartbeat_s": 0.05})
    go(config, tmp_path / "secured", beside=meets)
    held = {condition.type: condition.status for condition in left_behind(tmp_path / "secured").conditions}
    assert held["BoardConnected"] == "True"
    written = [path for path in (tmp_path / "secured").rglob("*") if path.is_file()]
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]

    process, address = serve(url)
    answer = httpx2.get(f"{address}/runs/secured").json()
    assert (answer["phase"], answer["iteration"]) == ("finished", 3)
    assert len(httpx2.get(f"{address}/runs/secured/metrics").json()) == 5
    process.terminate()
    process.wait(PATIENCE_S)

    def status(board: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "flowcredit", "status", str(tmp_path / "secured")]
        environment = os.environ | {"FLOWCREDIT_BOARD": board}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    assert "finished" in status(url).stdout
    refused = status(url.replace("authority.pem", "other.pem"))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
