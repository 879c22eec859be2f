"""The client of the warm process. Ray starts every worker through this module, so it imports little."""

import json
import resource
import signal
import socket
from array import array

PATIENCE_S = 30.0
"""Seconds after which the caller starts the process itself. Ray gives a worker up that has not started after 60."""


def fork(
    address: str,
    words: list[str],
    folder: str,
    variables: dict[str, str],
    streams: list[int],
    patience_s: float = PATIENCE_S,
) -> tuple[int, socket.socket]:
    """Fork a Python command; it inherits the caller's limits, blocked signals and OOM score.

    Args:
        address: path of the warm process's socket.
        words: the command, after `python`.
        variables: its whole environment.
        streams: file numbers of its stdin, stdout and stderr.
        patience_s: seconds until the fork must be there.

    Returns:
        The number of its process, and the socket from which `number_from` reads its exit code when it has ended.

    Raises:
        OSError: there is no warm process, or its imports took too long.
    """
    with open("/proc/self/oom_score_adj") as file:
        inherited = {
            "oom_score": file.read(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
    command = json.dumps({"words": words, "folder": folder, "variables": variables, "inherited": inherited}).encode()
    warm = socket.socket(socket.AF_UNIX)
    try:
        warm.settimeout(patience_s)
        warm.connect(address)
        size = len(command).to_bytes(8, "big")
        warm.sendmsg([size], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", streams))])
        warm.sendall(command)
        number = number_from(warm)
        warm.settimeout(None)
        return number, warm
    except OSError:
        warm.close()
        raise


def number_from(warm: socket.socket) -> int:
    """Return the next number; raise OSError if the warm process has ended."""
    if len(answer := warm.recv(8, socket.MSG_WAITALL)) < 8:
        raise ConnectionResetError("the warm process ended")
    return int.from_bytes(answer, "big", signed=True)
