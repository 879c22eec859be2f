"""Hosts whose clocks differ: the commands of one with libfaketime see and steer a run of another."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from deploy.board.board import Board
from tests.support.paths import ROOT
from tests.support.programs import need
from tests.support.runs.played import played_run

BOTH = """
from deploy.cli.app import app
from protocol.errors import FlowcreditError
for words in (["status", "alive"], ["pause", "alive"]):
    try:
        app(words, standalone_mode=False)
    except FlowcreditError as error:
        print(f"refused: {error}")
"""
OFFSETS_S = (-3600, -30, 30, 3600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, threading.Event]]:
    """The address of a board with the run `alive`, which carries out every command, until the event is set."""
    with played_run(tmp_path_factory.mktemp("board"), "alive") as found:
        yield found


def status_and_pause(url: str, offset_s: int) -> str:
    """What both commands say on a host whose clock is off by so many seconds."""
    command = [need("faketime"), "-f", f"{offset_s:+d}s", sys.executable, "-c", BOTH]
    variables = os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "COLUMNS": "160", "FLOWCREDIT_BOARD": url}
    return subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_a_clock_that_is_off_calls_no_run_silent_and_refuses_no_command(run, offset_s):
    said = status_and_pause(run[0], offset_s)
    assert "running" in said
    assert "silent" not in said
    assert said.endswith("done: as asked\n")


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
    for offset_s in OFFSETS_S:
        said = status_and_pause(url, offset_s)
        assert "refused: run alive has fallen silent: it takes no commands" in said
