"""Ctrl-C in a run in one process ends it in bounded time, also while a scorer hangs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protocol.messages import Metadata, Prompt, Scores
from tests.support.paths import ROOT
from tests.support.runs.presets import small_preset
from tests.support.waiting import PATIENCE_S, wait_until


class Sleeper:
    """Sleeps for ten minutes, while it is built or while it scores; the file `sign` then exists."""

    name, low, high = "sleeper", 0.0, 1.0

    def __init__(self, *, sign: str, sleeps: str) -> None:
        self._sign, self._sleeps = Path(sign), sleeps
        if sleeps == "built":
            self._sleep()

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Every prompt can be scored."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        self._sleep()
        return Scores.missing(len(images), "awake")

    def _sleep(self) -> None:
        self._sign.touch()
        time.sleep(600)


@pytest.mark.parametrize(
    ("sleeps", "code", "line"),
    [("built", 0, ""), ("scores", 130, "flowcredit: stopped at once; `train` continues from the newest checkpoint\n")],
    ids=["the first while it is built", "the second while it scores"],
)
def test_ctrl_c_ends_a_run_whose_scorer_hangs(
    tmp_path: Path, tiny_sd3: Path, sleeps: str, code: int, line: str
) -> None:
    sign = tmp_path / "sign"
    preset = small_preset(tmp_path, tiny_sd3, scorer=f"{__name__}:Sleeper", status={"board": "off"})
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
