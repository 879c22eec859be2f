"""Limits on the connections of both HTTP services; they apply before a token is checked.

A request must arrive in time, the number of connections is limited, and equal messages are logged rarely. uvicorn and
hypercorn have a timeout between two requests, but none for a request that does not arrive.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deploy.api import problems

log = logging.getLogger(__name__)
MOST_CONNECTIONS = 512
"""Largest number of connections at one time, or half of the files that the process may open, if that is less."""
BACKLOG = 64
"""Connections that may wait to be accepted; all of them are accepted at once."""
LOG_EVERY_S = 10.0
LIMITED_LOGS = ("uvicorn.error", "asyncio", problems.log.name, __name__)
"""Loggers of messages that a client can cause as often as it likes."""


def _most_connections() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, files // 2))


class BoundedConnection(H11Protocol):
    """One connection. If there are too many, one is closed: of the peer with the most connections that wait for the
    rest of a request, the one that has waited longest.

    So a client that sends its request at once is served, however many other connections send nothing or little.
    """

    head_s = 10.0
    """Seconds in which the head of a request must have arrived, and then the part of its body that nobody reads."""
    body_rate = 1024 * 1024
    """Bytes of a body that must arrive in a second, on average after the first `head_s`."""
    most = _most_connections()

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._awaited: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.since = 0.0
        """When the waiting began, on the event loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            log.warning("more than %d connections: those that wait longest for a request are closed", self.most)
            waiting = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_waiting]
            of_peer = Counter(each.peer for each in waiting)
            max(waiting, key=lambda each: (of_peer[each.peer], -each.since)).give_up()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Go on to the next request; a body that is still arriving is read by nobody."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a request, or for the rest of one."""
        return self._awaited is not None

    @property
    def peer(self) -> str:
        """The address of the other end."""
        return self.client[0] if self.client else ""

    def give_up(self) -> None:
        """Close the connection without an answer."""
        self.connections.discard(self)
        self.transport.abort()

    def _watch(self) -> None:
        """Set the timer for the head or the body of the request; a part that arrives does not prolong it."""
        awaited, seconds = None, self.head_s
        if self.conn.their_state is h11.IDLE:
            awaited = "head"
        elif self.conn.their_state is h11.SEND_BODY:
            awaited = "body" if self.conn.our_state is not h11.DONE else "rest"
            length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            seconds += length / self.body_rate if awaited == "body" else 0.0
        if awaited == self._awaited:
            return
        if self._timer:
            self._timer.cancel()
        self._awaited, self.since = awaited, self.loop.time()
        self._timer = self.loop.call_later(seconds, self.give_up) if awaited else None


class Sparing(logging.Filter):
    """Logs a message of one form once every `LOG_EVERY_S` at most, with the number of suppressed ones.

    A request that the server itself cancels when it ends is not an error and is never logged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        if record.exc_info and record.exc_info[0] is asyncio.CancelledError:
            return False
        now, form = self._clock(), f"{record.name} {str(record.msg)[:200]}"
        last, kept = self._logged.get(form, (now - LOG_EVERY_S, 0))
        if now - last < LOG_EVERY_S:
            self._logged[form] = last, kept + 1
            return False
        if len(self._logged) > 1000:
            self._logged.clear()
        self._logged[form] = now, 0
        if kept:
            record.msg, record.args = f"{record.getMessage()} (and {kept} times more)", ()
        return True


def log_sparingly() -> None:
    """Limit how much clients can make this process log."""
    for name in LIMITED_LOGS:
        logging.getLogger(name).addFilter(Sparing())
