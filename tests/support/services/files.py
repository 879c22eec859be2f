"""A local server of files, in place of public addresses."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar


class Server(BaseHTTPRequestHandler):
    """Serves `files`, and parts of them; after `breaks_after` bytes it closes the connection once."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str | None]] = []
    breaks_after: ClassVar[int | None] = None

    def do_GET(self) -> None:
        content, part = self.files.get(self.path), self.headers.get("range")
        self.asked.append(part)
        if content is None:
            self.send_error(404)
            return
        start = int(part.removeprefix("bytes=").rstrip("-")) if part else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if part else 200)
        self.send_header("content-length", str(len(content) - start))
        self.end_headers()
        stop, Server.breaks_after = Server.breaks_after, None
        self.wfile.write(content[start : len(content) if stop is None else stop])

    def log_message(self, *words: object) -> None:
        del words


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve files by their path; yields the address."""
    Server.files = dict(files)
    Server.asked, Server.breaks_after = [], None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
