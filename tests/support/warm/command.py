"""`python -m flowcredit …` as a fork of the warm process."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from deploy.run.warm.client import fork, number_from
from tests.support.paths import ROOT
from tests.support.warm.ray_workers import ADDRESS, variables


def start_python(*words: str, environment: Mapping[str, str] | None = None) -> "Process":
    """Start a Python command in the project's folder: as a fork of the warm process where there is one.

    Args:
        words: the command, after `python`.
        environment: its variables; this process's own if left out.

    Returns:
        The process, whose `stdout` holds what it writes to stdout and stderr.
    """
    variables_of_it = dict(environment or os.environ)
    if address := variables().get(ADDRESS):
        return WarmCommand(address, words, variables_of_it)
    command = [sys.executable, *words]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=variables_of_it, text=True, **both)


class WarmCommand:
    """A fork of the warm process; the part of `subprocess.Popen` that tests use."""

    def __init__(self, address: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            self.pid, self._warm = fork(
                address, list(words), str(ROOT), dict(environment), [nothing, theirs, theirs], 100
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

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as `subprocess` counts it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._warm.settimeout(timeout)
            try:
                self.returncode = number_from(self._warm)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens to a command that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """kill."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


Process = WarmCommand | subprocess.Popen[str]
