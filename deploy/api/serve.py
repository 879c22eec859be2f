"""`flowcredit serve`: the status API and the page over a board, a run folder or a folder of runs."""

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deploy.api.app import make_app
from deploy.api.auth import Access
from deploy.api.folder_source import FolderSource
from deploy.api.source import Source
from deploy.board.board import Board
from protocol.config.status import SCHEMES
from protocol.errors import ConfigError


def source_of(where: str) -> Source:
    """A board's address, or a folder.

    Raises:
        ConfigError: neither.
    """
    if where.partition("://")[0] in SCHEMES:
        return Board(where)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{where} is no folder: give a run folder, a folder of runs or a board's address")
    return FolderSource(folder)


def serve(
    where: str, *, host: str, port: int, token: str | None, allowed_hosts: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Serve until interrupted.

    Raises:
        ConfigError: nothing to serve, a port in use, or other than loopback without a token.
    """
    import uvicorn

    app = make_app(source_of(where), Access(host=host, token=token, allowed_hosts=allowed_hosts))
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be served: {error.strerror}; choose another --port") from None
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=2, lifespan="on"
    )
    shown = f"[{host}]" if ":" in host else host
    with suppress(KeyboardInterrupt):
        say(f"page      http://{shown}:{listener.getsockname()[1]}/")
        if token is None:
            say("          for looking only: control needs a token, FLOWCREDIT_TOKEN or --token-file")
        sys.stdout.flush()
        uvicorn.Server(settings).run(sockets=[listener])
