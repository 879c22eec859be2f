"""What is asked of a run while it goes: pause, resume, checkpoint, stop, another size of a pool."""

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from protocol.status import Document

MAX_ACTORS = 1024
"""Largest pool that can be wished for."""
CommandKind = Literal["pause", "resume", "checkpoint", "stop", "scale"]


class Command(Document):
    """Something that was asked of a run, and what came of it."""

    id: str
    kind: CommandKind
    pool: str | None = None
    count: int | None = None
    """With `scale`: the wished size."""
    state: Literal["accepted", "working", "done", "failed", "superseded"] = "accepted"
    message: str = ""
    requested: float
    finished: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether its outcome is still to come."""
        return self.state in ("accepted", "working")


def new_command(kind: CommandKind, *, pool: str | None = None, count: int | None = None) -> Command:
    """A command with an id of its own."""
    return Command(id=uuid.uuid4().hex, kind=kind, pool=pool, count=count, requested=time.time())


def _no_text(value: Any) -> Any:
    """JSON's 3 and 3.0 are the same whole number; text and booleans are none."""
    if isinstance(value, str | bytes | bool):
        raise ValueError("must be a whole number")
    return value


Count = Annotated[int, Field(ge=1, le=MAX_ACTORS), BeforeValidator(_no_text)]
"""A pool's size in a request."""
