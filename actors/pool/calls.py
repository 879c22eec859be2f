"""Remote calls with a deadline and a heartbeat; tells a dead actor from a call that raised.

| what the caller sees | what happened                                                | what helps       |
|----------------------|--------------------------------------------------------------|------------------|
| `ActorFailedError`   | the actor died, hangs, or has no memory or a broken GPU      | another actor    |
| `ShardLostError`     | an argument or the answer was lost with its node             | making it again  |
| anything else        | the remote code raised it                                    | nothing          |
"""

import asyncio
import os
import socket
from contextvars import ContextVar
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from protocol.errors import ShardLostError, one_line

GROUP = "heartbeat"
HEARTBEAT: dict[str, Any] = {"concurrency_groups": {GROUP: 1}}
"""Options of an actor class that derives from `Alive`; all other calls still come one at a time."""


class Alive:
    """Answers pings while another call runs. A stopped process, or one that keeps the GIL, does not answer."""

    @ray.method(concurrency_group=GROUP)
    def ping(self) -> str:
        """Return the id of the actor's cluster node."""
        return ray.get_runtime_context().get_node_id()


GONE = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""Ray's exceptions for a dead actor."""
BROKEN = ("AcceleratorError", "OutOfMemoryError", "MemoryError")
"""Exceptions after which a process is useless: CUDA keeps its error state, memory stays fragmented."""


TURN: ContextVar["asyncio.Future[None] | None"] = ContextVar("TURN", default=None)
"""In the task of a call that was handed to its actor ahead: done when the calls before it have ended. Until then the
call has no deadline and sends no pings; those of the call before it hold for the actor."""


class ActorFailedError(Exception):
    """The actor is dead or useless; the same call may succeed on another one."""


async def answer(
    reference: "ray.ObjectRef[Any]",
    *,
    timeout_s: float,
    actor: Any = None,
    heartbeat_s: float | None = None,
    memory_remedy: str = "",
) -> Any:
    """Wait for the value of a remote call; an error that the remote code raised is raised as itself.

    Args:
        reference: the call's answer to come.
        timeout_s: seconds for the whole call, counted from its turn (see `TURN`).
        actor: the actor that was called.
        heartbeat_s: seconds within which the actor must answer a ping at any time; None sends no pings.
        memory_remedy: what helps if the actor runs out of memory, for the error.

    Returns:
        The value.

    Raises:
        ActorFailedError: no answer in time, no heartbeat, or the actor died.
        ShardLostError: an argument or the answer was lost with its node.
    """
    call = asyncio.wrap_future(reference.future())
    try:
        await _until_done(call, timeout_s=timeout_s, actor=actor, heartbeat_s=heartbeat_s)
        return call.result()
    except RayTaskError as error:
        if isinstance(error.cause, ObjectLostError):
            raise ShardLostError(one_line(error.cause)) from error
        if _is_broken(error.cause):
            remedy = f"; {memory_remedy}" if memory_remedy and "Memory" in type(error.cause).__name__ else ""
            raise ActorFailedError(f"{type(error.cause).__name__}: {one_line(error.cause)}{remedy}") from error
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except ObjectLostError as error:
        raise ShardLostError(one_line(error)) from error
    except GONE as error:
        raise ActorFailedError(one_line(error)) from error
    finally:
        call.cancel()


async def _until_done(call: "asyncio.Future[Any]", *, timeout_s: float, actor: Any, heartbeat_s: float | None) -> None:
    clock = asyncio.get_running_loop().time
    if turn := TURN.get():
        await asyncio.wait({call, turn}, return_when=asyncio.FIRST_COMPLETED)
    deadline = clock() + timeout_s
    while not call.done():
        left = max(0.0, deadline - clock())
        await asyncio.wait({call}, timeout=min(left, heartbeat_s) if heartbeat_s else left)
        if call.done():
            return
        if clock() >= deadline:
            raise ActorFailedError(f"no answer within {timeout_s:g} s")
        if actor is not None and heartbeat_s:
            await _require_beat(call, actor, heartbeat_s)


async def _require_beat(call: "asyncio.Future[Any]", actor: Any, heartbeat_s: float) -> None:
    ping = asyncio.wrap_future(actor.ping.remote().future())
    try:
        await asyncio.wait({call, ping}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        if not call.done() and not ping.done():
            raise ActorFailedError(f"no sign of life within {heartbeat_s:g} s")
        if ping.done():
            ping.result()
    finally:
        ping.cancel()


def _is_broken(cause: Any) -> bool:
    return type(cause).__name__ in BROKEN or "CUDA error" in str(cause)


def whereabouts(actor: object) -> tuple[str, str, int]:  # noqa: ARG001
    """Return host name, node id and process id; `actor.__ray_call__.remote(whereabouts)` runs this in the actor."""
    return socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid()
