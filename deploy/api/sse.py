"""The server-sent events of a run: `status` when it changes, `metrics` lines and `event`s as they arrive."""

import asyncio
from collections.abc import AsyncIterator

from fastapi.sse import ServerSentEvent
from pydantic import BaseModel, Field

from deploy.api.cache import StatusCache
from deploy.api.history.curves import LINES_AT_ONCE
from deploy.api.problems import Problem
from deploy.api.source import Source
from protocol.errors import BoardError

POLL_S = 1.0
"""Seconds between two readings."""
EVENTS_AT_ONCE = 200


class Position(BaseModel):
    """The entries that a reader has already received, and whether it waits for more."""

    since: int = Field(0, ge=0, le=10**12, description="Return only metric lines after this number.")
    since_event: int = Field(0, ge=0, le=10**12, description="Return only events after this number.")
    session: str = Field("", max_length=100, description="Process of the run that these numbers belong to.")
    has_metrics: bool = Field(default=True, description="Send metric lines too.")
    once: bool = Field(default=False, description="End the answer after the entries that exist now.")


async def event_stream(
    cache: StatusCache, source: Source, run: str, position: Position
) -> AsyncIterator[ServerSentEvent]:
    """Stream until the reader closes it, or until the run is gone from the board.

    A run that was started again counts its lines from 1, so `metrics` then begin again. While the board is away,
    `status` holds since when.

    Args:
        source: gives lines and events.
        position: the last entries that the reader has; later ones are sent.

    Yields:
        Events `status`, `metrics` and `event`, without end unless `position.once`.
    """
    last, session, since, since_event = b"", position.session or None, position.since, position.since_event
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
            lines = (
                await source.lines(run, since=since, limit=LINES_AT_ONCE)
                if position.has_metrics and status.lines > since
                else []
            )
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
        has_more = len(lines) == LINES_AT_ONCE or len(events) == EVENTS_AT_ONCE
        if position.once and not has_more:
            return
        await asyncio.sleep(0 if has_more else POLL_S)
