"""Actors and calls to them: a deadline and a heartbeat for each call, and the state of each actor.

`answer` tells a dead actor from a call that raised:

| the caller gets      | cause                                                        | remedy           |
|----------------------|--------------------------------------------------------------|------------------|
| `ActorFailedError`   | the actor died, hangs, or has no memory or a broken GPU      | another actor    |
| `ShardLostError`     | an argument or the answer was lost with its node             | make it again    |
| any other exception  | the remote code raised it                                    | none             |
"""

import asyncio
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from actors.pool.usage import usage
from protocol.errors import ShardLostError, breaks_gpu, named_line, one_line
from protocol.messages import Adapter
from protocol.status import ActorState, ActorStatus, Usage

log = logging.getLogger(__name__)
Result = TypeVar("Result")
ActorHandle = Any
"""A Ray actor; its methods are not typed here."""
Work = Callable[[ActorHandle], Coroutine[Any, Any, Result]]
"""One call to one actor; raises `ActorFailedError` if the actor is gone."""
GROUP = "heartbeat"
HEARTBEAT: dict[str, Any] = {"concurrency_groups": {GROUP: 1}}
"""Options of an actor class that derives from `Alive`; all other calls still come one at a time."""


class Alive:
    """Answers pings, in a thread of their own, while another call runs. A stopped process, or one that keeps the GIL,
    does not answer.

    Actors load in `prepare`, not in their constructor, where Ray would turn a user's mistake into a dead actor.
    """

    @ray.method(concurrency_group=GROUP)
    def ping(self) -> None:
        """Return as soon as the process can run Python."""

    @ray.method(concurrency_group=GROUP)
    def usage(self) -> Usage:
        """Measure what the process uses."""
        return usage()


GONE = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""Ray's exceptions for a dead actor."""
BROKEN = ("OutOfMemoryError", "MemoryError")
"""Further exceptions after which a process is useless: its memory stays fragmented."""


TURN: ContextVar["asyncio.Future[None] | None"] = ContextVar("TURN", default=None)
"""In the task of a call that its actor holds in advance: done when the calls before it have ended. Until then the call
has no deadline and sends no pings; the pings of the call before it watch the actor."""


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
    """Wait for the value of a remote call; an error of the remote code is raised unchanged.

    Args:
        timeout_s: seconds for the whole call, counted from its turn (see `TURN`).
        heartbeat_s: seconds within which the actor must answer a ping at any time; None sends no pings.
        memory_remedy: the remedy that the error names if the actor runs out of memory.

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
            raise _lost(error.cause) from error
        if type(error.cause).__name__ in BROKEN or breaks_gpu(error.cause):
            remedy = f"; {memory_remedy}" if memory_remedy and "Memory" in type(error.cause).__name__ else ""
            raise ActorFailedError(f"{named_line(error.cause)}{remedy}") from error
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except ObjectLostError as error:
        raise _lost(error) from error
    except GONE as error:
        log.info("an actor failed; Ray says: %s", error)
        raise ActorFailedError(death(error)) from error
    finally:
        call.cancel()


def _lost(error: ObjectLostError) -> ShardLostError:
    log.info("an object is lost; Ray says: %s", error)
    return ShardLostError("the node that held its data is gone")


def death(error: Exception) -> str:
    """Say in one short line why an actor is dead, from Ray's long text.

    Args:
        error: one of `GONE`.

    Returns:
        The reason that Ray knows, where the process ran, and its id; if the actor could not start, the last line of its
        traceback; the whole text as one bounded line if nothing in it is known.
    """
    text = str(error).strip()
    if found := re.search(r"in its creation task.*?\bip=([^\s,)]+)", text):
        return one_line(f"it could not start on {found[1]}: {text.splitlines()[-1]}")
    if "running low on memory" in text or isinstance(error, OutOfMemoryError):
        used = re.search(r"running was (\S+ ?/ ?\S+)", text)
        return "Ray ended it because its node ran out of memory" + (f" ({used[1]})" if used else "")
    pid, ip = (re.search(rf"^\s*{name}: (\S+)", text, re.MULTILINE) for name in ("pid", "ip"))
    where = (f" {pid[1]}" if pid else "") + (f" on {ip[1]}" if ip else "")
    if "ray.kill" in text:
        return f"`ray.kill` ended its process{where}"
    if isinstance(error, NodeDiedError) or "node has died" in text:
        return "its node died" + (f": {ip[1]}" if ip else "")
    if found := re.search(r"Worker exit type: (\w+)", text):
        code = re.search(r"(?:exit code|signal) \d+", text)
        cause = code[0] if code else "it crashed or was killed, perhaps because its node ran out of memory"
        return f"its process{where} died ({found[1]}): {cause}"
    if isinstance(error, ActorUnavailableError) or re.search(r"rpc[ _]?(error|code)", text, re.IGNORECASE):
        return "its node does not answer" + (f": {ip[1]}" if ip else "")
    return one_line(error)


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


def whereabouts(actor: object) -> tuple[str, str, int]:  # noqa: ARG001
    """Return host name, node id and process id; `actor.__ray_call__.remote(whereabouts)` runs this in the actor."""
    return socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid()


@dataclass(eq=False)
class Call:
    """One call to one member. The pool makes and changes it."""

    member: "Member"
    turn: "asyncio.Future[None]"
    """Done when the member's calls before it have ended."""
    task: "asyncio.Task[Any] | None" = None
    is_blamed: bool = False
    """Whether the member failed while it worked on this call."""
    has_failed: bool = False
    """Whether the member failed before this call was answered."""


@dataclass(eq=False)
class Member:
    """One slot of a pool and the actor in it. The pool makes and changes it.

    Fields that `ActorStatus` has too have the same names.
    """

    slot: int
    restarts: int = 0
    """Actors that failed in this slot."""
    handle: ActorHandle = None
    state: ActorState = "waiting"
    node: str = ""
    node_id: str = ""
    pid: int | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None
    last_seen: float | None = None
    calls: int = 0
    busy_share: float | None = None
    fetched_bytes: int | None = None
    usage: Usage = field(default_factory=Usage)
    line: deque[Call] = field(default_factory=deque)
    """The call in progress, then the calls held in advance, in order."""
    began: float = 0.0
    """When its newest call began, by the monotonic clock."""
    _answers: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def runs_on(self, whereabouts: tuple[str, str, int]) -> None:
        """Note host name, node id and process id, as `whereabouts` returns them."""
        self.node, self.node_id, self.pid = whereabouts

    def begin(self) -> None:
        self.state, self.began = "busy", time.monotonic()

    def end(self) -> float:
        """Note that the call was answered; return the seconds that it took."""
        now = time.monotonic()
        self.state, self.last_seen = "idle", time.time()
        self.calls += 1
        self._answers.append(now)
        return now - self.began

    def hold(self, adapter: Adapter) -> None:
        """Note that the actor confirmed this adapter."""
        self.adapter_version, self.adapter_digest, self.last_seen = adapter.version, adapter.digest[:12], time.time()

    def status(self, kind: str) -> ActorStatus:
        shown = {name: getattr(self, name) for name in ActorStatus.model_fields.keys() - {"name", "kind"}}
        return ActorStatus(name=f"{kind}-{self.slot}", kind=kind, **shown)

    @property
    def calls_per_minute(self) -> float:
        """Calls that it answered per minute, over its newest answers."""
        if len(self._answers) < 2:
            return 0.0
        span = time.monotonic() - self._answers[0]
        return round(60 * (len(self._answers) - 1) / span, 1) if span > 0 else 0.0
