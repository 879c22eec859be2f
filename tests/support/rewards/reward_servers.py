"""Real HTTP servers on loopback for tests: one that answers as it is told, and the reward service itself."""

import asyncio
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from deploy.api.scorer_process import Facts, ScorerSlot
from deploy.api.serve import settings_of
from rewards.scorer import CheckedScorer


class Asked(NamedTuple):
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, str, bytes]
"""Status, content type, body."""


@contextmanager
def http_server(answer: Callable[[Asked], Answer]) -> Iterator[tuple[str, list[Asked]]]:
    """A server whose address and list of requests are given; `answer` may raise to break the connection."""
    seen: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            seen.append(asked)
            status, kind, data = answer(asked)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _serve

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def raw_server(parts: Callable[[], Iterator[bytes]]) -> Iterator[str]:
    """The address of a server that answers every connection with these pieces, as the network carries them."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):
                for part in parts():
                    self.request.sendall(part)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Here(ScorerSlot):
    """A scorer in this process, for services that are tested without a process for each scorer."""

    restarts, is_degraded = 0, False

    def __init__(self, scorer: CheckedScorer) -> None:
        self._scorer, self.facts = scorer, Facts.of(scorer)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function on a thread."""
        return await asyncio.to_thread(function, self._scorer, *args, **kwargs)


@contextmanager
def reward_service(app: Any, *, proxies: Sequence[str] = ()) -> Iterator[str]:
    """The address of an app that is served as the commands serve theirs."""
    import uvicorn

    config = settings_of(app, proxies=proxies)
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the service must start within 20 s"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
