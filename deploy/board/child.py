"""A child process that ends with this one, however this one ends: its watcher reads a pipe that this one holds open."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

WATCHER = """
exec 3<&0
"$@" 3<&- & child=$!
(
    read -r _ <&3
    for _ in 1 2 3 4 5 6 7 8; do kill "$child" || exit; sleep 0.5; done
    kill -9 "$child"
) 2>/dev/null & reader=$!
wait "$child"
kill "$reader" 2>/dev/null
"""
"""`read` returns when the pipe closes: at `stop`, or when the process that holds its other end is gone. The signal is
sent again, since the child may just be starting: then the first signal can be lost. A stopped child is killed after
four seconds."""
STOP_S = 5.0


class Child:
    """A running program in its own session, so that Ctrl-C does not reach it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """
        Args:
            command: program and arguments; its output is discarded.
            descriptors: file descriptors above 9 that it inherits.
        """
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", WATCHER, "watcher", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | (variables or {}),
            pass_fds=descriptors,
        )

    def is_running(self) -> bool:
        """Return whether the program still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end; after `STOP_S` seconds it is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it at once; it cannot clean up."""
        if self.is_running():  # otherwise the number may belong to another group by now
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
