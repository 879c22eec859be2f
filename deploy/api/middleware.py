"""The outermost layer of the server: it refuses names that are not its own and large bodies, before anything is read,
and has browsers load nothing from elsewhere."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.auth import Access
from deploy.api.problems import Problem

BODY_BYTES = 4_096
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        problem = self._problem(Headers(scope=scope))
        answering = problem.response() if problem else self._app
        await answering(scope, receive, send_with_headers)

    def _problem(self, headers: Headers) -> Problem | None:
        if not self._access.is_known_host(headers.get("host", "")):
            return Problem(421, "this server is not known by that name: start it with --allow-host")
        if "transfer-encoding" in headers:
            return Problem(411, "a body must say its length")
        if int(headers.get("content-length", 0)) > BODY_BYTES:  # the server has checked that it is a number
            return Problem(413, f"a body may have {BODY_BYTES} bytes")
        return None
