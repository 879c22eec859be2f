"""Hosts whose clocks differ: the commands of one with libfaketime see and steer a run of another."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.board.board import Board
from deploy.board.embedded import BoardServer
from deploy.board.publisher import Buffers, Publisher
from learner.loop.stopping import end_all
from protocol.commands import Command
from tests.support.paths import ROOT
from tests.support.programs import need
from tests.support.runs.statuses import a_status


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, threading.Event]]:
    """The address of a board with the run `alive`, which carries out every command, until the event is set."""
    server = BoardServer(tmp_path_factory.mktemp("board"))
    server.start()
    ending = threading.Event()

    async def live() -> None:
        buffers = Buffers()

        def carry_out(command: Command) -> None:
            done = {"state": "done", "message": "as asked", "finished": time.time()}
            buffers.commands[command.id] = command.model_copy(update=done)

        publisher = Publisher(
            Board(server.url),
            buffers,
            compose=lambda: a_status("alive", heartbeat_s=0.2, lines=0),
            on_command=carry_out,
            on_leftover=carry_out,
            on_contact=lambda _: None,
            keep_s=3600,
        )
        task = asyncio.create_task(publisher.run())
        while not ending.is_set():  # noqa: ASYNC110  another thread sets it
            await asyncio.sleep(0.1)
        await end_all([task])

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    yield server.url, ending
    ending.set()
    thread.join()
    server.stop()


def flowcredit(offset_s: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a host whose clock is off by so many seconds."""
    command = [need("faketime"), "-f", f"{offset_s:+d}s", sys.executable, "-m", "deploy", *words]
    variables = os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("offset_s", [-3600, 3600])
def test_a_clock_that_is_an_hour_off_calls_no_run_silent_and_refuses_no_command(run, tmp_path: Path, offset_s):
    url, _ = run
    paused = flowcredit(offset_s, "pause", str(tmp_path / "alive"), "--board", url)
    assert (paused.returncode, paused.stdout) == (0, "done: as asked\n"), paused.stderr
    shown = flowcredit(offset_s, "status", "alive", "--board", url)
    assert shown.returncode == 0
    assert "running" in shown.stdout
    assert "silent" not in shown.stdout


def test_a_silent_run_is_called_silent_by_every_clock(run):
    url, ending = run
    ending.set()

    async def falls_silent() -> None:
        board = Board(url)
        until = time.monotonic() + 60
        while (found := await board.status("alive")) is None or (found.silent_s or 0) < 5.5:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
        await board.close()

    asyncio.run(falls_silent())
    for offset_s in (-3600, 3600):
        refused = flowcredit(offset_s, "pause", "alive", "--board", url)
        assert refused.returncode == 1
        assert "run alive has fallen silent: it takes no commands" in refused.stderr
