"""The outermost layer of both HTTP services: it refuses unknown host names and large bodies before reading anything,
and keeps browsers from loading anything from other sites."""

import logging
from urllib.parse import urlsplit

from anyio import BrokenResourceError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.problems import Problem

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Guard:
    """ASGI middleware. It answers with problem details, which starlette's TrustedHostMiddleware cannot do."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, hosts: tuple[str, ...] = ()) -> None:
        """Wrap an application.

        Args:
            max_body_bytes: the largest body of a request.
            hosts: names that a request's Host header may hold; all if empty. On loopback this keeps web sites from
                pointing their own host names at the server.
        """
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._hosts = {name.lower() for name in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        problem = self._problem(Headers(scope=scope))
        answering = problem.response() if problem else self._app
        try:
            await answering(scope, receive, send_with_headers)
        except* BrokenResourceError:
            log.debug("the reader of %s has gone", scope["path"])  # then FastAPI's event stream raises it

    def _problem(self, headers: Headers) -> Problem | None:
        if self._hosts and _name(headers.get("host", "")) not in self._hosts:
            return Problem(421, "this server is not known by that name: start it with --allow-host")
        if "transfer-encoding" in headers:
            return Problem(411, "a body must state its length")
        if int(headers.get("content-length", 0)) > self._max_body_bytes:  # uvicorn has checked that it is a number
            return Problem(413, f"a body may have {self._max_body_bytes} bytes: send less at once")
        return None


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
