"""How a process asks the warm one for a fork. It imports little, since Ray starts a worker through it every time."""

import json
import socket
from array import array


def ask(address, words, folder, variables, streams):
    """Have a command forked.

    Args:
        address: path of the warm process's socket.
        words: the command, after `python`.
        folder: where it works.
        variables: all its environment.
        streams: file numbers of its stdin, stdout and stderr.

    Returns:
        Its process number, and the socket from which its exit code can be read with `number_from` when it has ended.

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


def number_from(warm):
    """The next number; OSError when the warm process has ended."""
    if len(answer := warm.recv(8, socket.MSG_WAITALL)) < 8:
        raise ConnectionResetError("the warm process ended")
    return int.from_bytes(answer, "big", signed=True)
