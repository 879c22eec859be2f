"""Listen on an address and serve an application there until interrupted; both HTTP services start this way."""

import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from types import FrameType
from typing import TYPE_CHECKING

from fastapi import FastAPI

from protocol.errors import ConfigError, one_line

if TYPE_CHECKING:
    import uvicorn


def listen(host: str, port: int, *, descriptor: int | None = None) -> tuple[socket.socket, str]:
    """Open a listening socket.

    Args:
        host: name or address of this machine.
        port: the port; 0 for any free one.
        descriptor: file descriptor of a listening socket to use instead.

    Returns:
        The socket, and its address as a URL without a path; an IPv6 address is in brackets.

    Raises:
        ConfigError: the address is not one of this machine, or the port is in use.
    """
    is_ipv6 = ":" in host
    try:
        if descriptor is not None:
            listener = socket.socket(fileno=descriptor)
        else:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {one_line(error)}; set --host and --port") from None
    return listener, f"http://{f'[{host}]' if is_ipv6 else host}:{listener.getsockname()[1]}"


def settings_of(app: FastAPI, *, proxies: Sequence[str] = (), grace_s: int | None = None) -> "uvicorn.Config":
    """Return uvicorn's settings, see `serve_until_interrupted`."""
    import uvicorn

    from deploy.api.connections import BACKLOG, BoundedConnection

    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        lifespan="on",
        http=BoundedConnection,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        backlog=BACKLOG,
    )


def serve_until_interrupted(
    app: FastAPI,
    listener: socket.socket,
    *,
    announcement: str,
    proxies: Sequence[str] = (),
    grace_s: int | None = None,
    linger_s: float = 0.0,
) -> None:
    """Announce an application on stdout and serve it until Ctrl-C or SIGTERM.

    Args:
        announcement: printed once connections are accepted.
        proxies: addresses, or networks, of proxies whose X-Forwarded-For names the client.
        grace_s: seconds that requests in progress may still take; None waits for them.
        linger_s: seconds for which it goes on after the first signal if a client is connected, so that the client sees
            the end of the run. SIGTERM again does not shorten them (`deploy.board.child` repeats it); Ctrl-C does.
    """
    import uvicorn

    from deploy.api.connections import log_sparingly

    class Server(uvicorn.Server):
        is_lingering = False

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:  # from now on a signal ends it in order, also where Ctrl-C was ignored before
                sys.stdout.write(f"{announcement}\n")
                sys.stdout.flush()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if linger_s and self.server_state.connections and not self.is_lingering:
                self.is_lingering = True
                timer = Timer(linger_s, super().handle_exit, (sig, frame))
                timer.daemon = True  # it must not keep a process that Ctrl-C ended
                timer.start()
            elif not self.is_lingering or sig == signal.SIGINT:
                super().handle_exit(sig, frame)

    log_sparingly()
    with suppress(KeyboardInterrupt):
        Server(settings_of(app, proxies=proxies, grace_s=grace_s)).run(sockets=[listener])
