"""Signals: the first ends a run in order, a deadline ends it in any case, the second ends it at once.

In a run in one process they do so also while a scorer hangs.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from deploy.run.signals import stop_on_signal
from protocol.messages import Metadata, Prompt, Scores
from rewards.scores import scored
from tests.support.paths import ROOT
from tests.support.runs.presets import small_preset
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def _terminal() -> Iterator[None]:
    """The tests may themselves have been started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["stop", "closed terminal"])
async def test_the_first_signal_sets_the_event_and_leaves_the_work_alone(number):
    said = []
    with stop_on_signal(said.append, within_s=30) as stop:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 60)
        await asyncio.sleep(0.05)
    (line,) = said
    assert "with a checkpoint" in line


async def test_work_that_does_not_end_in_time_is_left_and_the_run_ends_in_order():
    said = []
    with stop_on_signal(said.append, within_s=0.1):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    assert "did not end within 0.1 s and was abandoned" in said[1]


async def test_a_stop_without_a_signal_has_the_same_deadline():
    """A command through the board sets the event."""
    said = []
    with stop_on_signal(said.append, within_s=0.1) as stop:
        stop.set()
        await asyncio.sleep(60)
    (line,) = said
    assert "did not end within 0.1 s and was abandoned" in line


def test_the_second_signal_ends_at_once():
    async def scene():
        with stop_on_signal(lambda text: None, within_s=30):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())


async def test_a_terminal_that_closes_for_shell_and_system_stops_a_run_with_a_checkpoint():
    said = []
    with stop_on_signal(said.append, within_s=30) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert stop.is_set()
    (line,) = said
    assert "with a checkpoint" in line
    os.kill(os.getpid(), signal.SIGHUP)  # the last of them may come late


async def test_a_closed_terminal_stops_no_run_that_was_started_with_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signal(lambda text: None, within_s=30) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


HELD_OUT = "green circle"


class Sleeper:
    """Sleeps for ten minutes, while it is built or while it scores for training; the file `sign` then exists."""

    name, low, high = "sleeper", 0.0, 1.0

    def __init__(self, *, sign: str, sleeps: str) -> None:
        self._sign, self._sleeps = Path(sign), sleeps
        if sleeps == "built":
            self._sleep()

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Every prompt can be scored."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        if HELD_OUT not in prompts:  # an evaluation ends at the first signal
            self._sleep()
        return scored(np.zeros(len(images), np.float32))

    def _sleep(self) -> None:
        self._sign.touch()
        time.sleep(600)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("sleeps", "code", "line"),
    [("built", 0, ""), ("scores", 130, "flowcredit: stopped at once; `train` continues from the newest checkpoint\n")],
    ids=["the first while it is built", "the second while it scores"],
)
def test_ctrl_c_ends_a_run_whose_scorer_hangs(
    tmp_path: Path, tiny_sd3: Path, sleeps: str, code: int, line: str
) -> None:
    sign = tmp_path / "sign"
    (heldout := tmp_path / "heldout.txt").write_text(HELD_OUT)
    data = {"train": str(tmp_path / "prompts.txt"), "heldout": str(heldout)}
    preset = small_preset(tmp_path, tiny_sd3, scorer=f"{__name__}:Sleeper", status={"board": "off"}, data=data)
    args = f"rewards.only.args={{sign: {sign}, sleeps: {sleeps}}}"
    words = [sys.executable, "-m", "flowcredit", "train", str(preset), args, "--local", "--run", str(tmp_path / "run")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(sign.exists)
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout
            while "stopping with a checkpoint" not in (said := process.stdout.readline()):
                assert said, "the run ended before"
            if code:
                os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (code, line)
