"""Asks the warm process for a fork. Ray starts every worker through this module, so it imports little."""

import json
import socket
from array import array


def ask(
    address: str, words: list[str], folder: str, variables: dict[str, str], streams: list[int]
) -> tuple[int, socket.socket]:
    """Have a Python command forked.

    Args:
        address: path of the warm process's socket.
        words: the command, after `python`.
        folder: its working folder.
        variables: its whole environment.
        streams: file numbers of its stdin, stdout and stderr.

    Returns:
        The number of its process, and the socket from which `number_from` reads its exit code when it has ended.

    Raises:
        OSError: there is no warm process.
    """
    command = json.dumps({"words": words, "folder": folder, "variables": variables}).encode()
    warm = socket.socket(socket.AF_UNIX)
    try:
        warm.connect(address)
        size = len(command).to_bytes(8, "big")
        warm.sendmsg([size], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", streams))])
        warm.sendall(command)
        return number_from(warm), warm
    except OSError:
        warm.close()
        raise


def number_from(warm: socket.socket) -> int:
    """Return the next number; raise OSError if the warm process has ended."""
    if len(answer := warm.recv(8, socket.MSG_WAITALL)) < 8:
        raise ConnectionResetError("the warm process ended")
    return int.from_bytes(answer, "big", signed=True)
