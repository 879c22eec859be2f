"""The warm process, `python process.py SOCKET`: it imports the large libraries once and forks Python commands.

torch, diffusers, transformers and PEFT take six seconds of CPU to import, a fork takes none. Nothing of Ray and
nothing of ours is imported before the fork: a command does the rest of its way as it always would. A connection
brings one command with its three streams, and gets eight bytes for the process number and, when the command has
ended, eight for its exit code as `subprocess` counts it. The warm process ends with its stdin.
"""

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import diffusers  # noqa: F401
import peft  # noqa: F401
import torch  # noqa: F401
import transformers.modeling_utils  # noqa: F401

PATH = sys.path[1:]


def serve(address: str) -> tuple[dict[str, Any], list[int]] | None:
    """In each forked process its command and streams; in the warm one None, when stdin has ended."""
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door, selectors.DefaultSelector() as selector:
        door.bind(f"{address}.new")
        door.listen(64)
        os.rename(f"{address}.new", address)  # whoever finds it can connect
        for each in (door, ended, sys.stdin):
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if ended in ready:
                os.read(ended, 4096)
                _report(waiting)
            if sys.stdin in ready:
                return None
            if door in ready:
                asker, _ = door.accept()
                try:
                    command, streams = _received(asker)
                except (OSError, ValueError):  # it was killed before it had said all
                    asker.close()
                    continue
                if not (number := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for mine in (asker, *waiting.values()):
                        mine.close()
                    for mine in (ended, wake):
                        os.close(mine)
                    return command, streams
                for stream in streams:
                    os.close(stream)
                waiting[number] = asker
                _tell(asker, number)


def _received(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(asker, 8, 3)
    with asker.makefile("rb") as body:
        return json.loads(body.read(int.from_bytes(head, "big"))), streams


def _report(waiting: dict[int, socket.socket]) -> None:
    for number in list(waiting):
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            with waiting.pop(number) as asker:
                _tell(asker, os.waitstatus_to_exitcode(status))


def _tell(asker: socket.socket, number: int) -> None:
    with suppress(OSError):  # Ray's workers are not waited for
        asker.sendall(number.to_bytes(8, "big", signed=True))


def run(command: dict[str, Any], streams: list[int]) -> None:
    """Become this command: `SCRIPT WORD…`, `-m MODULE WORD…` or `-c CODE WORD…`, with `-u` before it or not."""
    for stream, number in zip(streams, range(3), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(command["variables"])
    os.chdir(command["folder"])
    words = command["words"]
    while words[0] == "-u":
        words = words[1:]
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=words != command["words"])
    kind, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("", words)
    first = os.getcwd() if kind else os.path.dirname(os.path.abspath(words[0]))
    further = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    sys.path[:] = [first, *further, *PATH]
    sys.argv[:] = [kind, *rest[1:]] if kind else words
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(rest[0], {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # in the forks too: at its end each would spend a second on a search for garbage in all these modules
    if found := serve(sys.argv[1]):
        run(*found)
