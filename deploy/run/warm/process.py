"""The warm process, `python process.py SOCKET MODULE…`: it imports modules once and forks Python commands.

The libraries of a rollout actor or a learner worker take six seconds of CPU time to import; a fork takes none. Commands
may be sent before the imports are done, and wait. Nothing of Ray is imported: a fork continues as any Python process
would. A connection brings one command with its three streams. It gets eight bytes for the number of its process and,
when the command has ended, eight for its exit code as `subprocess` counts it. The warm process ends with its stdin.
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
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

PATH = sys.path[1:]
PATIENCE_S = 5.0
"""Seconds within which an asker must have said everything; others wait for it."""


def serve(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for each command.

    Args:
        door: where commands arrive.

    Returns:
        In each forked process its command and streams; in the warm process None, when stdin has ended.
    """
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, socket.socket] = {}
    with door, selectors.DefaultSelector() as selector:
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
                if _is_gone(asker):
                    number = None
                elif not (number := os.fork()):
                    os.setpgid(0, 0)  # when a worker has ended, Ray kills the whole group of its process
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for mine in (asker, *waiting.values()):
                        mine.close()
                    for mine in (ended, wake):
                        os.close(mine)
                    return command, streams
                for stream in streams:
                    os.close(stream)
                if number is None:
                    asker.close()
                else:
                    waiting[number] = asker
                    _tell(asker, number)


def _received(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    asker.settimeout(PATIENCE_S)
    head, streams, _, _ = socket.recv_fds(asker, 8, 3)
    try:
        with asker.makefile("rb") as body:
            command = json.loads(body.read(int.from_bytes(head, "big")))
    except (OSError, ValueError):
        for stream in streams:
            os.close(stream)
        raise
    asker.settimeout(None)
    return command, streams


def _is_gone(asker: socket.socket) -> bool:
    """Say whether the asker has ended: Ray kills a start that takes too long, and tries again."""
    try:
        return not asker.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(waiting: dict[int, socket.socket]) -> None:
    for number in list(waiting):
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            with waiting.pop(number) as asker:
                _tell(asker, os.waitstatus_to_exitcode(status))


def _tell(asker: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits for a worker of Ray
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
    sys.stdout.reconfigure(write_through=words != command["words"])  # pyright: ignore[reportAttributeAccessIssue]
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


def main(address: Path, modules: list[str]) -> tuple[dict[str, Any], list[int]] | None:
    """Import the modules and serve; return as `serve` does."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(f"{address}.new")
    door.listen(64)
    os.rename(f"{address}.new", address)  # whoever finds it can connect
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()  # in the forks too: at its end each would spend a second on a search for garbage in all these modules
    found = serve(door)
    if found is None:
        rmtree(address.parent, ignore_errors=True)
    return found


if __name__ == "__main__":
    sys.path[:] = PATH
    if found := main(Path(sys.argv[1]), sys.argv[2:]):
        run(*found)
