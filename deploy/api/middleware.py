"""The outermost layer of both HTTP services: it refuses unknown host names, large bodies and bodies without the token
before it reads them, bounds the bodies that arrive, and keeps browsers from loading anything from other sites."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from anyio import BrokenResourceError, CancelScope
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.problems import Problem

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PEER_BODIES = 64
"""Bodies of one client that may be arriving at a time."""
MIB = 1024 * 1024


class RequestGuard:
    """ASGI middleware. The application gets a request with its whole body.

    It answers with problem details, which starlette's TrustedHostMiddleware cannot do.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        bodies_held: int,
        hosts: tuple[str, ...] = (),
        admit: Callable[[Request], Awaitable[None]] | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            bodies_held: number of largest bodies that may be in memory at one time.
            hosts: names that a request's Host header may hold; all if empty. On loopback this keeps web sites from
                pointing their own host names at the server.
            admit: raises Problem if the body of a request must not be read.
        """
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._hosts = {name.lower() for name in hosts}
        self._admit = admit
        self._bodies = _Bodies(bodies_held * max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            await self._serve(scope, receive, send_with_headers)
        except* (BrokenResourceError, ClientDisconnect):
            log.debug("the client of %s has gone", scope["path"])  # FastAPI's event stream raises the first

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parts = await self._body(scope, receive)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return

        async def replayed() -> Message:
            if not parts:
                return await receive()
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        with self._bodies.holding(sum(map(len, parts))):
            await self._app(scope, replayed, send)

    async def _body(self, scope: Scope, receive: Receive) -> list[bytes]:
        """Return the parts of the body, none if nobody reads it (Problem: the request is refused)."""
        size = self._size(Headers(scope=scope))
        if not size or scope["method"] in ("GET", "HEAD"):
            return []
        if self._admit:
            await self._admit(Request(scope))
        return await self._bodies.arrived(scope["client"][0] if scope["client"] else "", size, receive)

    def _size(self, headers: Headers) -> int:
        """Return the announced length of the body (Problem: the request is refused)."""
        if self._hosts and "host" in headers and _name(headers["host"]) not in self._hosts:
            raise Problem(421, "this server is not known by that name: start it with --allow-host")
        if "transfer-encoding" in headers:
            raise Problem(411, "a body must state its length")
        size = int(headers.get("content-length", 0))  # uvicorn has checked that it is a number
        if size > self._max_body_bytes:
            raise Problem(413, f"a body may have {self._max_body_bytes} bytes: send less at once")
        return size


@dataclass(eq=False)
class _Arriving:
    peer: str
    reading: CancelScope
    size: int = 0


class _Bodies:
    """The bodies in memory: whole ones, until their requests are answered, and the parts of others that have arrived.

    If there are too many, the body that has been arriving longest is dropped: what is announced holds no room.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._whole = 0
        self._arriving: dict[_Arriving, None] = {}
        """Oldest first."""

    async def arrived(self, peer: str, size: int, receive: Receive) -> list[bytes]:
        """Return the parts of a body once all have arrived.

        Raises:
            Problem: 503, other requests use the memory.
            ClientDisconnect: the client has gone.
        """
        if self._whole + size > self._most_bytes:
            raise Problem(503, f"requests in progress already hold {self._whole // MIB} MiB: try again later")
        parts: list[bytes] = []
        with CancelScope() as reading:
            this = _Arriving(peer, reading)
            self._arriving[this] = None
            try:
                self._drop([each for each in self._arriving if each.peer == peer][:-PEER_BODIES])
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    this.size += len(parts[-1])
                    while self._whole + sum(each.size for each in self._arriving) > self._most_bytes:
                        self._drop([next(iter(self._arriving))])
                    if not message.get("more_body", False):
                        return parts
            finally:
                self._arriving.pop(this, None)
        raise Problem(503, "the body arrived too slowly, and others need its room: try again later")

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count a whole body until its request is answered."""
        self._whole += size
        try:
            yield
        finally:
            self._whole -= size

    def _drop(self, bodies: list[_Arriving]) -> None:
        for body in bodies:
            del self._arriving[body]
            body.reading.cancel()


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
