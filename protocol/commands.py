"""Commands to a running run: pause, resume, checkpoint, stop, scale a pool."""

import time
import uuid
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from protocol.status import Document

MAX_ACTORS = 1024
"""Largest size that a pool can be scaled to."""
CommandKind = Literal["pause", "resume", "checkpoint", "stop", "scale"]


class Command(Document):
    """A command and its outcome."""

    id: str
    kind: CommandKind
    pool: str | None = None
    count: int | None = None
    """With `scale`: the desired size."""
    state: Literal["accepted", "working", "done", "failed", "superseded"] = "accepted"
    message: str = ""
    requested: float
    finished: float | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """Refuse a `scale` that a run could not carry out: anybody may write to a board."""
        if self.kind == "scale" and (self.pool is None or self.count is None or not 1 <= self.count <= MAX_ACTORS):
            raise ValueError(f"scale must name a pool and 1 to {MAX_ACTORS} actors, got {self.count}")
        return self

    @property
    def is_open(self) -> bool:
        """Whether it has no outcome yet."""
        return self.state in ("accepted", "working")


def new_command(kind: CommandKind, *, pool: str | None = None, count: int | None = None) -> Command:
    """Make a command with an id of its own.

    Args:
        pool: with `scale`: the pool's name.
        count: with `scale`: the desired number of actors.

    Returns:
        An accepted command, requested now.
    """
    return Command(id=uuid.uuid4().hex, kind=kind, pool=pool, count=count, requested=time.time())


def _no_text(value: Any) -> Any:
    """Refuse text and booleans; JSON's 3 and 3.0 are the same whole number."""
    if isinstance(value, str | bytes | bool):
        raise ValueError("must be a whole number")
    return value


Count = Annotated[int, Field(ge=1, le=MAX_ACTORS), BeforeValidator(_no_text)]
"""A pool's size in a request."""
