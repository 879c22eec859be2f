"""The server-sent events of a run: `status` when it changes, `metrics` lines and `event`s as they arrive."""

import asyncio
from collections.abc import AsyncIterator

from fastapi.sse import ServerSentEvent

from deploy.api.cache import StatusCache
from deploy.api.problems import Problem
from deploy.api.source import Source
from protocol.errors import BoardError

POLL_S = 1.0
"""Seconds between two readings."""
LINES_AT_ONCE, EVENTS_AT_ONCE = 1_000, 200


async def event_stream(
    cache: StatusCache, source: Source, run: str, *, since: int, since_event: int
) -> AsyncIterator[ServerSentEvent]:
    """Stream until the reader closes it, or until the run is gone from the board.

    A run that was started again counts its lines from 1, so `metrics` then begin again. While the board is away,
    `status` says since when.

    Args:
        cache: where the status is read.
        source: where lines and events are read.
        run: the run's name.
        since: send metric lines with a `seq` above this.
        since_event: send events with a number above this.

    Returns:
        Events `status`, `metrics` and `event`, without end.
    """
    last, session = b"", None
    while True:
        try:
            status, text = await cache.status(run), await cache.json(run)
        except (Problem, BoardError):
            return
        if session not in (None, status.session):
            since = since_event = 0
        session = status.session
        if text != last:
            last = text
            yield ServerSentEvent(event="status", raw_data=text.decode())
        try:
            lines = await source.lines(run, since=since, limit=LINES_AT_ONCE) if status.lines > since else []
            events = await source.events(run, since=since_event, limit=EVENTS_AT_ONCE)
        except BoardError:
            lines, events = [], []
        if lines:
            since = lines[-1].seq
            texts = ",".join(line.model_dump_json() for line in lines)
            yield ServerSentEvent(event="metrics", id=str(since), raw_data=f"[{texts}]")
        for event in events:
            since_event = event.number
            yield ServerSentEvent(event="event", raw_data=event.model_dump_json())
        await asyncio.sleep(POLL_S if len(lines) < LINES_AT_ONCE else 0)
