"""Hosts whose clocks differ: the commands of one whose clock is wrong see and steer a run of another."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.board.board import Board
from tests.lab.faults.clock import wrong_clock
from tests.support.paths import ROOT
from tests.support.runs.played import played_run
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
BOTH = """
from deploy.cli.app import app
from protocol.errors import FlowcreditError
for words in (["status", "alive"], ["pause", "alive"]):
    try:
        app(words, standalone_mode=False)
    except FlowcreditError as error:
        print(f"refused: {error}")
"""
OFFSETS_S = (-3600, 30)
WAITS = """
import ctypes, platform, threading, time

class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_int64), ("ns", ctypes.c_int64)]

def deadline():
    ns = time.time_ns() + 100_000_000
    return ctypes.byref(Timespec(ns // 10**9, ns % 10**9))

c, semaphore, futex = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.c_int(0)
c.sem_init(semaphore, 0, 0)
WAIT_BITSET, CLOCK_REALTIME = 9, 256
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
waits = [
    lambda: c.sem_timedwait(semaphore, deadline()),
    lambda: c.syscall(FUTEX, ctypes.byref(futex), WAIT_BITSET | CLOCK_REALTIME, 0, deadline(), None, -1),
    lambda: threading.Event().wait(0.1),
    lambda: time.sleep(0.1),
]
for wait in waits:
    began = time.monotonic()
    wait()
    print(time.monotonic() - began)
print(time.monotonic(), time.time())
"""
"""Waits of 0.1 s on the wall clock (as C++ does) and on the monotonic one."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, threading.Event]]:
    """The address of a board with the run `alive`, which carries out every command, until the event is set."""
    with played_run(tmp_path_factory.mktemp("board"), "alive") as found:
        yield found


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """For LD_PRELOAD, by how many seconds the clock is ahead."""
    folder = tmp_path_factory.mktemp("clocks")
    return {offset_s: wrong_clock(folder, offset_s) for offset_s in OFFSETS_S}


def said_with(clock: Path, code: str, **variables: str) -> str:
    """What Python code says on a host with this clock."""
    variables = os.environ | {"LD_PRELOAD": str(clock)} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


def status_and_pause(url: str, clock: Path) -> str:
    """What both commands say on a host with this clock."""
    return said_with(clock, BOTH, COLUMNS="160", FLOWCREDIT_BOARD=url)


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_a_wrong_clock_is_wrong_by_this_much_and_every_wait_is_as_long_as_it_should_be(libraries, offset_s):
    *waits, clocks = said_with(libraries[offset_s], WAITS).splitlines()
    assert len(waits) == 4
    assert all(0.09 < float(seconds) < 20 for seconds in waits)
    monotonic, wall = map(float, clocks.split())
    assert abs(wall - time.time() - offset_s - (monotonic - time.monotonic())) < 5


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_a_clock_that_is_off_calls_no_run_silent_and_refuses_no_command(run, libraries, offset_s):
    said = status_and_pause(run[0], libraries[offset_s])
    assert "running" in said
    assert "silent" not in said
    assert said.endswith("done: as asked\n")


async def test_a_silent_run_is_called_silent_by_every_clock(run, libraries):
    url, ending = run
    ending.set()
    board = Board(url)

    async def is_silent() -> bool:
        found = await board.status("alive")
        return found is not None and (found.silent_s or 0) >= 5.5

    await until(is_silent)
    await board.close()
    for offset_s in OFFSETS_S:
        said = status_and_pause(url, libraries[offset_s])
        assert "refused: run alive has fallen silent: it takes no commands" in said
