"""The password of a board's address is shown nowhere, in whatever form the address is written."""

import asyncio
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy.api.source import open_source
from deploy.board.board import Board
from deploy.board.lease import BoardLease
from deploy.folder.lease import Lease
from deploy.monitor.page_server import PageServer
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, FlowcreditError
from protocol.ground.addresses import SCHEMES, check_address, without_password
from tests.support.runs.watched import REDNESS, go
from tests.support.waiting import wait_until

HALVES = ("alphaword", "omegaword")
USABLE = (
    "redis://:alphaword%2Fomegaword@127.0.0.1:1/0",
    "redis://me:alphaword%40omegaword@127.0.0.1:1",
    "redis://:alphaword:omegaword@127.0.0.1:1/0",
    "redis://127.0.0.1:1/0?password=alphawordomegaword",
    "rediss://:alphawordomegaword@[::1]:1/0?ssl_cert_reqs=none",
    "unix://:alphawordomegaword@/nowhere/board.sock?db=0",
)
UNCERTAIN = (
    "redis://:alphaword/omegaword@127.0.0.1:1/0",
    "redis://:alphaword?omegaword@127.0.0.1:1/0",
    "redis://:alphaword#omegaword@127.0.0.1:1/0",
    "redis://:alphaword@omegaword@127.0.0.1:1/0",
    "redis://:alphaword omegaword@127.0.0.1:1/0",
    "redis://:alphaword[omegaword@127.0.0.1:1/0",
    "redis://:alphaword\u2100omegaword/@127.0.0.1:1/0",
    "redis://:alphaword%2Fomegaword@127.0.0.1:1,127.0.0.2:1/0",
    "redis://127.0.0.1:1/0?password=alphaword@omegaword",
    "redis://127.0.0.1:1/0?password=alphaword?omegaword",
    "redis://:alphawordomegaword",
    "unix://:alphaword/omegaword@/nowhere/board.sock",
    "redis+sentinel://:alphaword@127.0.0.1:26379,omegaword:26379/main",
    "redis-sentinel://me:alphaword/omegaword@127.0.0.1:26379/main",
    "http://:alphaword/omegaword@127.0.0.1",
    "REDIS://:alphaword/omegaword@127.0.0.1",
    ":alphaword/omegaword@127.0.0.1:1",
)


def is_told(text: str) -> bool:
    return any(half in text for half in HALVES)


def failure(work: Callable[[], object]) -> str:
    """The traceback that `work` ends with."""
    try:
        work()
    except Exception:  # noqa: BLE001  whatever it is, its text is looked at
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("address", [*USABLE, *UNCERTAIN])
def test_no_form_of_an_address_tells_its_password(address, tmp_path, tiny_config, caplog):
    caplog.set_level(logging.DEBUG)

    def ping() -> None:
        asyncio.run(Board(address).ping())

    def take() -> None:
        held = Lease.take(tmp_path)
        try:
            BoardLease(address, run="mine", under=held, keep_s=60).take().release()
        finally:
            held.release()

    works = (ping, take, lambda: open_source(address), lambda: tiny_config(status={"board": address}))
    said = [without_password(address), *map(failure, works), caplog.text]
    assert [text for text in said if is_told(text)] == []


@pytest.mark.parametrize("address", UNCERTAIN)
def test_an_address_whose_password_is_not_certain_is_refused_with_the_remedy(address):
    is_board = address.partition("://")[0] in SCHEMES
    with pytest.raises(ConfigError, match="%XX" if is_board else "must begin with redis://, rediss://, unix://"):
        check_address(address)


@pytest.mark.parametrize("address", USABLE)
def test_usable_addresses_are_usable(address):
    check_address(address)
    assert asyncio.run(_host(address)) in ("127.0.0.1", "::1", None)


async def _host(address: str) -> str | None:
    board = Board(address)
    with pytest.raises(FlowcreditError, match="does not answer"):
        await board.ping()
    await board.close()
    found = without_password(address)
    return None if found.startswith("unix") else found.partition("://")[2].rpartition(":")[0].strip("[]")


def test_addresses_are_shown_without_user_and_options():
    assert without_password("rediss://user:word@host:6379/0?ssl_cert_reqs=none") == "rediss://host:6379/0"
    assert without_password("unix://:word@/tmp/board.sock") == "unix:///tmp/board.sock"
    assert without_password("redis://:wo/rd@host") == "redis://…"


@pytest.mark.parametrize("address", [USABLE[0], UNCERTAIN[0], UNCERTAIN[12]])
def test_a_run_with_such_an_address_writes_it_nowhere(
    address, tiny_config: Callable[..., RunConfig], tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("FLOWCREDIT_BOARD", address)
    config = tiny_config(iterations=1, rewards=REDNESS, status={"heartbeat_s": 0.05, "trajectories": 0})
    go(config, tmp_path / "run", slow_s=0.1)
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or not any(half.encode() in path.read_bytes() for half in HALVES), path
    assert not is_told("".join(capfd.readouterr()))


def test_no_child_of_a_run_has_the_password_among_its_arguments(tmp_path):
    said: list[str] = []

    def is_there() -> bool:
        said.append(words_of_children())
        return "serve" in said[-1]

    server = PageServer(tmp_path, board=USABLE[0])
    try:
        wait_until(is_there)
        assert not is_told(" ".join(said))
    finally:
        server.stop()


def words_of_children() -> str:
    """The command lines of this process's children."""
    return " ".join(word for child in psutil.Process().children(recursive=True) for word in words_of(child))


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_config_holds_no_password(tiny_config: Callable[..., RunConfig], tmp_path: Path):
    for address in (USABLE[0], USABLE[3], "rediss://me:word@host:1/0"):
        with pytest.raises(ConfigError, match="status.board must hold no password"):
            tiny_config(status={"board": address})
    assert tiny_config(status={"board": "rediss://me@host:6380/0?ssl_ca_certs=/etc/ca.pem"}).status.board
