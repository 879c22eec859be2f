"""The page's server: a token of its own, started again when it is killed, gone with the run."""

import asyncio
import os
import urllib.error
import urllib.request
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from deploy.board.embedded import BoardServer
from deploy.folder.names import TOKEN
from deploy.folder.run_folder import open_run_folder
from deploy.monitor import page_server
from deploy.monitor.journal import RunJournal
from deploy.monitor.observe import Observed
from deploy.monitor.page_server import PageServer
from deploy.monitor.progress import Progress
from deploy.run.local import LocalFleet
from tests.support.runs.sinks import Said
from tests.support.waiting import wait_until


def serves(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def until_served(address: str) -> None:
    wait_until(lambda: serves(address), why="the page is not served")


@pytest.mark.timeout(200)
def test_a_page_s_server_that_is_killed_is_started_again_at_the_same_address(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(page_server, "EVERY_S", 0.0)
    others = set(psutil.Process().children())
    page, said = PageServer(tmp_path), Said()
    (watcher,) = set(psutil.Process().children()) - others
    assert ((tmp_path / TOKEN).stat().st_mode & 0o777) == 0o600
    until_served(page.address)
    page.restart_if_ended(said)
    (server,) = (each for each in watcher.children() if each.exe() == psutil.Process().exe())
    assert os.getpgid(server.pid) == watcher.pid, "a group of its own, not that of the tests"
    server.kill()

    def is_seen() -> bool:
        page.restart_if_ended(said)
        return ("PageServed", False, "Ended") in [stated[:3] for stated in said.conditions]

    wait_until(is_seen, why="its end is not seen")
    until_served(page.address)
    page.restart_if_ended(said)
    assert [condition for condition, _ in groupby(stated[:3] for stated in said.conditions)] == [
        ("PageServed", True, "Serving"),
        ("PageServed", False, "Ended"),
        ("PageServed", True, "Serving"),
    ]
    page.stop(is_taken_over=True)
    assert set(psutil.Process().children()) == others, "the port itself may be another test's by now"
    assert (tmp_path / TOKEN).exists()
    page.stop()
    assert not (tmp_path / TOKEN).exists()


@pytest.mark.whole
def test_runs_started_at_the_same_time_have_an_address_each(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    pages = [PageServer(folder) for folder in folders]
    try:
        assert pages[0].address != pages[1].address
        for page in pages:
            until_served(page.address)
    finally:
        for page in pages:
            page.stop()


@pytest.mark.timeout(200)
async def test_the_page_of_a_run_on_a_shared_board_is_the_board_s(tiny_config, tmp_path: Path, monkeypatch):
    shared = BoardServer(tmp_path)
    shared.start()
    monkeypatch.setenv("FLOWCREDIT_BOARD", shared.url)
    config = tiny_config(status={"heartbeat_s": 0.05})
    run, stop = open_run_folder(tmp_path / "mine", config), asyncio.Event()
    async with Observed(run, LocalFleet(config), RunJournal(run, Progress()), stop) as observed:
        observed.reporter.begin(0)
        address = observed.open_page()
        assert address is not None
        await asyncio.to_thread(until_served, address)
        token = (run.path / TOKEN).read_text()
        request = urllib.request.Request(
            f"{address.partition('#')[0]}runs/mine/commands",
            data=b'{"command": "stop"}',
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=60) as answer:
            assert answer.status == 202
        await stop.wait()
    assert address.endswith("/#run=mine")
    run.close()
    shared.stop()
