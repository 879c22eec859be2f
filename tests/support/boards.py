"""Boards to test against: the embedded Valkey and, where it is installed, Debian's Redis with a password."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.board.embedded import BoardServer

KINDS = ("valkey", "redis with a password")


@contextmanager
def board_of(kind: str, folder: Path) -> Iterator[str]:
    """The address of a board that lives as long as the context."""
    if kind == "valkey":
        server = BoardServer(folder)
        server.start()
        yield server.url
        server.stop()
        return
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    socket = folder / "r.sock"
    words = [program, "--port", "0", "--unixsocket", str(socket), "--requirepass", "secret-word", "--save", ""]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    yield f"unix://:secret-word@{socket}"
    process.terminate()
    process.wait(10)
