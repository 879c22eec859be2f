"""A run's server-sent events: `status` when it changes, `metrics` lines and `event`s as they come."""

import asyncio
from collections.abc import AsyncIterator

from fastapi.sse import ServerSentEvent

from deploy.api.cache import Glance
from deploy.api.problems import Problem
from deploy.api.source import Source
from protocol.errors import BoardError

POLL_S = 1.0
"""Seconds between two looks."""
LINES_AT_ONCE, EVENTS_AT_ONCE = 1_000, 200


async def event_stream(
    glance: Glance, source: Source, run: str, *, since: int, since_event: int
) -> AsyncIterator[ServerSentEvent]:
    """Endless; whoever reads it ends it. It ends by itself when the run is gone from the board.

    A run that was started again begins its counting anew, and `metrics` then come from the first line on. While the
    board is away `status` says since when.
    """
    last, session = b"", None
    while True:
        try:
            status, text = await glance.status(run), await glance.json(run)
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
