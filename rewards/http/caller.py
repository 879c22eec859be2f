"""Bounded HTTP calls: each try has a timeout, all tries together a deadline.

A broken connection, a late answer and the statuses 429, 500, 502, 503 and 504 are retried. The waits between tries grow
and are random, so that many actors do not return at the same moment. Any other status is final.
"""

import os
from typing import Any

from protocol.errors import FlowcreditError, ScorerError, one_line

PASSING = frozenset({429, 500, 502, 503, 504})
LONGEST_WAIT_S = 15.0


class CallError(FlowcreditError):
    """An HTTP call that failed on its last try."""


class _PassingError(CallError):
    """A failure that another try may not meet."""


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
            timeout_s: seconds for one try.
            tries: at least 1.
            deadline_s: seconds for all tries of one call together; no try begins after it.
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
        self._tries, self._deadline_s = tries, deadline_s
        try:
            self._client = httpx2.Client(base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False)
        except httpx2.InvalidURL as error:
            raise ScorerError(f"url must be an address such as http://host:8100, got {url!r}: {error}") from None
        self._broken = httpx2.TransportError

    def call(self, method: str, path: str, **request: Any) -> Any:
        """Send a request and return the response of status 200, with its body read.

        Args:
            method: GET or POST.
            path: appended to the base address.
            request: arguments of httpx's `Client.request`.

        Raises:
            CallError: no such response within the tries and the deadline; the message says how the last try ended.
        """
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay
        from tenacity import wait_random_exponential as growing

        retrying = Retrying(
            stop=stop_after_attempt(self._tries) | stop_after_delay(self._deadline_s),
            wait=growing(multiplier=0.25, max=LONGEST_WAIT_S),
            retry=retry_if_exception_type(_PassingError),
            reraise=True,
        )
        return retrying(self._once, method, path, request)

    def _once(self, method: str, path: str, request: dict[str, Any]) -> Any:
        where = f"{method} {self.url}{path}"
        try:
            response = self._client.request(method, path, **request)
        except self._broken as error:
            raise _PassingError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
        if response.status_code == 200:
            return response
        kind = _PassingError if response.status_code in PASSING else CallError
        raise kind(f"{where}: status {response.status_code}: {_detail(response)}")


def _detail(response: Any) -> str:
    """The `detail` of problem details (RFC 9457), otherwise the text of an error's body, in one bounded line."""
    try:
        said = response.json()["detail"]
    except (ValueError, LookupError, TypeError):
        said = response.text
    return one_line(said or "no reason given")


def _token(name: str) -> str:
    token = os.environ.get(name)
    if not token:
        raise ScorerError(f"the environment variable {name} must hold the token, got none: set it where actors run")
    return token
