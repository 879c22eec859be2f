"""Bounded HTTP calls: each try has a timeout, all tries together have a deadline, and the size of a reply is limited.

Both limits apply to the whole reply: neither a server that sends a byte now and then nor a small body that unpacks to a
large one exceeds them. A broken connection, a late answer and the statuses 429, 500, 502, 503 and 504 are retried. The
waits between tries grow and are random, so that many actors do not return at the same moment. Any other status is
final.
"""

import asyncio
import json
import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from protocol.errors import FlowcreditError, ScorerError, named_line, one_line

PASSING = frozenset({429, 500, 502, 503, 504})
LONGEST_WAIT_S = 15.0
MOST_BYTES = 16 * 1024 * 1024
"""Largest body of a reply, as sent and when unpacked."""
HELLO_S = 10.0
"""Seconds within which a server must answer before a run."""


class CallError(FlowcreditError):
    """An HTTP call that failed on its last try."""


class _PassingError(CallError):
    """A failure that may not happen again on another try."""


@dataclass(frozen=True)
class Reply:
    kind: str
    """Its content type, without parameters."""
    content: bytes


class HttpCaller:
    """The client of one server; several threads may use it.

    caller = HttpCaller("http://127.0.0.1:8100", timeout_s=60, tries=4, deadline_s=200)
    reply = caller.call("POST", "/v1/score", content=data, headers={"content-type": "application/msgpack"})
    """

    def __init__(
        self, url: str, *, timeout_s: float, tries: int, deadline_s: float, token_env: str | None = None
    ) -> None:
        """Check the settings; no request is sent.

        Args:
            url: base address, `http://host:port` or with a path.
            tries: at least 1.
            deadline_s: seconds for one call with all its tries and waits.
            token_env: environment variable that holds the bearer token.

        Raises:
            ScorerError: a malformed address, a number out of range, or a token that is not set.
        """
        import httpx2

        if not str(url).startswith(("http://", "https://")):
            raise ScorerError(f"url must start with http:// or https://, got {url!r}")
        if tries < 1 or timeout_s <= 0 or deadline_s <= 0:
            raise ScorerError(
                f"tries must be at least 1, timeout_s and deadline_s above 0, got {tries}, {timeout_s}, {deadline_s}"
            )
        headers = {"authorization": f"Bearer {_token(token_env)}"} if token_env else {}
        self.url = url.rstrip("/")
        self._timeout_s, self._tries, self._deadline_s = timeout_s, tries, deadline_s
        try:
            self._client = httpx2.AsyncClient(base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False)
        except httpx2.InvalidURL as error:
            raise ScorerError(f"url must be an address such as http://host:8100, got {url!r}: {error}") from None
        self._broken, self._unreadable = httpx2.TransportError, httpx2.DecodingError

    def call(self, method: str, path: str, **request: Any) -> Reply:
        """Send a request and return the reply of status 200.

        Args:
            request: arguments of httpx's `Client.request`.

        Raises:
            CallError: no such reply within the tries and the deadline; the message says how the last try ended.
        """
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_before_delay
        from tenacity import wait_random_exponential as growing

        until = time.monotonic() + self._deadline_s
        retrying = Retrying(
            stop=stop_after_attempt(self._tries) | stop_before_delay(self._deadline_s),
            wait=growing(multiplier=0.25, max=LONGEST_WAIT_S),
            retry=retry_if_exception_type(_PassingError),
            reraise=True,
        )
        return retrying(self._once, method, path, request, until)

    def require_answer(self) -> None:
        """Raise ScorerError if no server answers at the address within the timeout, whatever the answer is."""
        asked = asyncio.run_coroutine_threadsafe(self._exchange("GET", "", {}, self._timeout_s), _loop())
        try:
            asked.result()
        except (TimeoutError, self._broken, self._unreadable) as error:
            raise ScorerError(
                f"no server answers at {self.url}: {one_line(error)}; start it first, or correct url"
            ) from None

    def _once(self, method: str, path: str, request: dict[str, Any], until: float) -> Reply:
        where = f"{method} {self.url}{path}"
        seconds = min(self._timeout_s, max(0.0, until - time.monotonic()))
        asked = asyncio.run_coroutine_threadsafe(self._exchange(method, path, request, seconds), _loop())
        try:
            status, reply = asked.result()
        except TimeoutError:
            limit = f"{seconds:.3g} s" if seconds == self._timeout_s else f"the deadline of {self._deadline_s:.3g} s"
            raise _PassingError(f"{where}: no whole reply within {limit}") from None
        except self._broken as error:
            raise _PassingError(f"{where}: {named_line(error)}") from error
        except self._unreadable as error:
            raise CallError(f"{where}: the reply cannot be unpacked: {one_line(error)}") from error
        if reply is None:
            raise CallError(f"{where}: a reply may have {MOST_BYTES // 1024**2} MiB, sent or unpacked, got more")
        if status == 200:
            return reply
        kind = _PassingError if status in PASSING else CallError
        raise kind(f"{where}: status {status}: {_detail(reply)}")

    async def _exchange(
        self, method: str, path: str, request: dict[str, Any], seconds: float
    ) -> tuple[int, Reply | None]:
        """Return the status and the reply, None if it is too large (TimeoutError: it is not complete in time)."""
        async with asyncio.timeout(seconds), self._client.stream(method, path, **request) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if max(len(body), response.num_bytes_downloaded) > MOST_BYTES:
                    return response.status_code, None
        kind = response.headers.get("content-type", "").split(";")[0]
        return response.status_code, Reply(kind, bytes(body))


def require_server(*, url: str, token_env: str | None = None, **_: Any) -> None:
    """Raise ScorerError if no server answers at `url` or the token is not set; this is a scorer's `ready`."""
    HttpCaller(url, timeout_s=HELLO_S, tries=1, deadline_s=HELLO_S, token_env=token_env).require_answer()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all calls of this process; it has its own thread, so a call can end at any time."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http-caller", daemon=True).start()
    return loop


def _detail(reply: Reply) -> str:
    """Return the `detail` of problem details (RFC 9457), otherwise the text of an error's body, as one bounded line."""
    try:
        detail = json.loads(reply.content)["detail"]
    except (ValueError, LookupError, TypeError, RecursionError):
        detail = reply.content[:4096].decode(errors="replace")
    return one_line(detail or "no reason given")


def _token(name: str) -> str:
    token = os.environ.get(name)
    if not token:
        raise ScorerError(f"the environment variable {name} must hold the token, got none: set it where actors run")
    return token
