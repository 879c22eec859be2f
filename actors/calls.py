"""Waiting for a remote call with a deadline, and telling a dead actor from a failed call."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

DEAD = (RayActorError, WorkerCrashedError, TimeoutError)
"""What a call ends with when its actor died or hangs; the same call may succeed on another actor."""


async def answer(reference: "ray.ObjectRef[Any]", *, timeout_s: float) -> Any:
    """The value of a remote call; an error that the remote code raised comes back as itself.

    Raises:
        TimeoutError: no answer within `timeout_s`.
        RayActorError: the actor died.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
