"""The warm process, `python process.py SOCKET MODULE…`: it imports modules once and forks Python commands.

The libraries of a rollout actor or a learner worker take six seconds of CPU time to import; a fork takes none. Commands
may be sent before the imports are done, and wait. Nothing of Ray is imported: a fork continues as any Python process
would. A connection brings one command with its three streams. It gets eight bytes for the number of its process and,
when the command has ended, eight for its exit code as `subprocess` counts it. The warm process ends with its stdin.

It takes no command if a module cannot be imported, or has started a thread or opened a GPU: a fork would be broken.
"""

import gc
import json
import os
import resource
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

PATH = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
PATIENCE_S = 5.0
"""Seconds within which a client must have sent everything, because other clients wait meanwhile."""


def serve(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for each command.

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
                client, _ = door.accept()
                try:
                    command, streams = _received(client)
                except (OSError, OverflowError, ValueError):  # the client was killed before it had sent everything
                    client.close()
                    continue
                if _is_gone(client):
                    number = None
                elif not (number := os.fork()):
                    os.setpgid(0, 0)  # when a worker has ended, Ray kills the whole group of its process
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for mine in (client, *waiting.values()):
                        mine.close()
                    for mine in (ended, wake):
                        os.close(mine)
                    return command, streams
                for stream in streams:
                    os.close(stream)
                if number is None:
                    client.close()
                else:
                    waiting[number] = client
                    _tell(client, number)


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    client.settimeout(PATIENCE_S)
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    try:
        if len(streams) < 3:
            raise ValueError(f"a command must bring three streams, got {len(streams)}")
        with client.makefile("rb") as body:
            command = json.loads(body.read(int.from_bytes(head, "big")))
    except (OSError, OverflowError, ValueError):
        for stream in streams:
            os.close(stream)
        raise
    client.settimeout(None)
    return command, streams


def _is_gone(client: socket.socket) -> bool:
    """Say whether the client no longer waits: it starts the command itself after some time, and Ray may kill it."""
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(waiting: dict[int, socket.socket]) -> None:
    for number in list(waiting):
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            with waiting.pop(number) as client:
                _tell(client, os.waitstatus_to_exitcode(status))


def _tell(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits for a worker of Ray
        client.sendall(number.to_bytes(8, "big", signed=True))


def run(command: dict[str, Any], streams: list[int]) -> None:
    """Become this command: `SCRIPT WORD…`, `-m MODULE WORD…` or `-c CODE WORD…`, with `-u` before it or not."""
    for stream, number in zip(streams, range(3), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    _inherit(**command["inherited"])
    os.environ.clear()
    os.environ.update(command["variables"])
    os.chdir(command["folder"])
    words = command["words"]
    while words[0] == "-u":
        words = words[1:]
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=words != command["words"])  # pyrefly: ignore[missing-attribute]
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


def _inherit(*, oom_score: str, files: list[int], blocked: list[int]) -> None:
    """Take what the client has inherited from Ray."""
    with suppress(OSError):  # only root may lower it
        Path("/proc/self/oom_score_adj").write_text(oom_score)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0], files[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_forkable() -> bool:
    """Say whether a fork of this process can do all that a new process can."""
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(name.startswith("/dev/nvidia") for name in opened)


def main(address: Path, modules: list[str]) -> tuple[dict[str, Any], list[int]] | None:
    """Import the modules and serve; return as `serve` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then ends this process
    door = socket.socket(socket.AF_UNIX)
    door.bind(f"{address}.new")
    door.listen(64)
    os.rename(f"{address}.new", address)  # once the path exists, connections are accepted
    try:
        for name in modules:
            import_module(name)
        is_ready = is_forkable()
    except Exception:  # noqa: BLE001  whatever a library raises, workers that are no forks report it
        is_ready = False
    if is_ready:
        gc.collect()
        gc.freeze()  # also for the forks: each would search all modules for garbage at its end, which takes a second
        found = serve(door)
    else:
        door.close()
        sys.stdin.read()
        found = None
    if found is None:
        rmtree(address.parent, ignore_errors=True)
    return found


if __name__ == "__main__":
    sys.path[:] = PATH
    if found := main(Path(sys.argv[1]), sys.argv[2:]):
        run(*found)
