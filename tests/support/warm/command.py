"""`python -m deploy …` as a fork of the warm process."""

import os
import signal
import subprocess
from collections.abc import Mapping

from tests.support.paths import ROOT
from tests.support.warm.ask import ask, number_from
from tests.support.warm.ray_workers import ADDRESS, variables


class WarmCommand:
    """A Python command that works in the project's folder; the part of `subprocess.Popen` that tests use."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            self.pid, self._warm = ask(
                variables()[ADDRESS], words, str(ROOT), dict(environment or os.environ), [nothing, theirs, theirs]
            )
        finally:
            os.close(nothing)
            os.close(theirs)
        self.stdout = open(ours)  # noqa: SIM115
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code, as `subprocess` counts it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._warm.settimeout(timeout_s)
            try:
                self.returncode = number_from(self._warm)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens to a command that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)
