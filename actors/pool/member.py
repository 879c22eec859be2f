"""The members of a pool: what is known about one actor, and how an actor starts.

An actor is spawned, waits for a node, prepares itself (loads its model or scorer) and is then admitted to the pool.

| a start             | while it has no node                            | when the actor dies or raises              |
|---------------------|-------------------------------------------------|--------------------------------------------|
| needed: a first     | waits while other members work; without any, it | a death counts as a restart; an error that |
| member, a successor | counts as failed after `patience_s`             | the actor raises ends the pool             |
| desired: by `scale` | waits until the desired size changes            | is tried again; `trouble` has the reason   |

At most `JOINING` desired members of a pool start at one time, so that no desired size slows the run; the others
wait in line without an actor.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import ray

from actors.pool.calls import ActorFailedError, answer, whereabouts
from actors.pool.restarts import backoff_s
from protocol.errors import one_line
from protocol.messages import Adapter
from protocol.status import ActorState, ActorStatus

ActorHandle = Any
"""A Ray actor; its methods are not typed here."""


@dataclass(eq=False)
class Call:
    """One call on one member. The pool makes and changes it."""

    member: "Member"
    turn: "asyncio.Future[None]"
    """Done when the calls before it on the member have ended."""
    task: "asyncio.Task[Any] | None" = None
    is_blamed: bool = False
    """Whether the member failed while this call was at work."""
    is_lost: bool = False
    """Whether the member failed before this call was answered."""


@dataclass(eq=False)
class Member:
    """One slot of a pool and the actor in it. The pool makes and changes it."""

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
    calls: int = 0
    seen: float | None = None
    busy_share: float | None = None
    fetched_bytes: int | None = None
    line: deque[Call] = field(default_factory=deque)
    """The call at work, and those that were handed ahead, in their order."""
    began: float = 0.0
    """When its newest call began, by the monotonic clock."""
    _answers: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def runs_on(self, whereabouts: tuple[str, str, int]) -> None:
        """Note host name, node id and process id, as `actors.pool.calls.whereabouts` returns them."""
        self.node, self.node_id, self.pid = whereabouts

    def begin(self) -> None:
        """Note that a call begins."""
        self.state, self.began = "busy", time.monotonic()

    def end(self) -> float:
        """Note that the call was answered; return the seconds that it took."""
        now = time.monotonic()
        self.state, self.seen = "idle", time.time()
        self.calls += 1
        self._answers.append(now)
        return now - self.began

    def hold(self, adapter: Adapter) -> None:
        """Note that the actor confirmed this adapter."""
        self.adapter_version, self.adapter_digest, self.seen = adapter.version, adapter.digest, time.time()

    def status(self, kind: str) -> ActorStatus:
        """Describe the actor for the status."""
        return ActorStatus(
            name=f"{kind}-{self.slot}",
            kind=kind,
            state=self.state,
            node=self.node,
            node_id=self.node_id,
            pid=self.pid,
            adapter_version=self.adapter_version,
            adapter_digest=self.adapter_digest[:12] if self.adapter_digest else None,
            last_seen=self.seen,
            calls=self.calls,
            calls_per_minute=self._per_minute(),
            restarts=self.restarts,
            busy_share=self.busy_share,
            fetched_bytes=self.fetched_bytes,
        )

    def _per_minute(self) -> float:
        if len(self._answers) < 2:
            return 0.0
        span = time.monotonic() - self._answers[0]
        return round(60 * (len(self._answers) - 1) / span, 1) if span > 0 else 0.0


log = logging.getLogger(__name__)
Result = TypeVar("Result")
RETRY_S = (5.0, 60.0)
"""Seconds until a desired member that failed is tried again: at first, and at most."""
JOINING = 8
"""Desired members of a pool that start at one time."""
Work = Callable[[ActorHandle], Awaitable[Result]]
"""One call on one actor; raises `ActorFailedError` when the actor is gone."""


class Host(Protocol):
    """What a start needs of its pool."""

    name: str

    @property
    def is_empty(self) -> bool:
        """Whether no member is ready."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether it takes no more members."""
        ...

    def admit(self, member: Member) -> None:
        """Add a member that is ready to work."""
        ...

    def count_restart(self, handle: ActorHandle, error: BaseException) -> float:
        """Count a failed actor; return the seconds to wait before its successor."""
        ...


class Starts:
    """The members of one pool that are starting. Made and called by the pool only."""

    def __init__(
        self, pool: Host, *, spawn: Callable[[int], ActorHandle], prepare: Work[Any], patience_s: float
    ) -> None:
        """
        Args:
            pool: admits the members.
            spawn: makes the actor of a slot.
            prepare: makes a running actor ready to work.
            patience_s: seconds to wait for a node where no other member works.
        """
        self.trouble = ""
        """Why the newest desired member could not start; empty if it could."""
        self._pool = pool
        self._spawn = spawn
        self._prepare = prepare
        self._patience_s = patience_s
        self._tasks: dict[asyncio.Task[None], Member] = {}
        self._needed: set[asyncio.Task[None]] = set()
        self._joining = asyncio.Semaphore(JOINING)

    @property
    def members(self) -> list[Member]:
        """The members in the order of their starts."""
        return list(self._tasks.values())

    def begin(self, member: Member, *, is_needed: bool, pause_s: float = 0.0) -> "asyncio.Task[None]":
        """Start an actor in the member's slot.

        Args:
            member: gets the actor.
            is_needed: see the table above.
            pause_s: seconds to wait first.

        Returns:
            A task that ends when the pool has admitted the member, or with its error.
        """
        start = self._start_needed(member, pause_s) if is_needed else self._start_desired(member)
        task = asyncio.ensure_future(start)
        self._tasks[task] = member
        if is_needed:
            self._needed.add(task)
            task.add_done_callback(self._needed.discard)
        return task

    def cancel(self, surplus: int) -> None:
        """Cancel `surplus` starts after the desired size changed: desired members before needed ones, newest first.

        Without this order a pool without members could wait for a desired member for ever.
        """
        self.trouble = ""
        newest_first = list(reversed(self._tasks))
        for task in sorted(newest_first, key=self._needed.__contains__)[: max(0, surplus)]:
            self._tasks.pop(task)
            task.cancel()

    def stop(self) -> None:
        """Cancel every start."""
        for task in self._tasks:
            task.cancel()

    async def _start_needed(self, member: Member, pause_s: float = 0.0) -> None:
        while not self._pool.has_failed:
            await asyncio.sleep(pause_s)
            try:
                await self._admit(member, is_needed=True)
                return
            except ActorFailedError as error:
                member.restarts += 1
                pause_s = self._pool.count_restart(member.handle, error)

    async def _start_desired(self, member: Member) -> None:
        failures = 0
        while not self._pool.has_failed:
            try:
                async with self._joining:
                    await self._admit(member, is_needed=False)
            except Exception as error:
                self.trouble = one_line(error)
                failures += 1
                pause_s = backoff_s(failures, RETRY_S)
                message = "no further %s actor yet (%s); again in %.0f s"
                log.warning(message, self._pool.name, self.trouble, pause_s, exc_info=True)
                await asyncio.sleep(pause_s)
            else:
                self.trouble = ""
                return

    async def _admit(self, member: Member, *, is_needed: bool) -> None:
        member.state, member.handle = "waiting", self._spawn(member.slot)
        try:
            await self._wait_for_node(member, is_needed=is_needed)
            member.state = "starting"
            await self._prepare(member.handle)
        except BaseException:
            if ray.is_initialized():
                ray.kill(member.handle)
            raise
        member.state, member.seen = "idle", time.time()
        self._tasks = {task: other for task, other in self._tasks.items() if other is not member}
        self._pool.admit(member)

    async def _wait_for_node(self, member: Member, *, is_needed: bool) -> None:
        """Wait until the actor runs on a node; the table above says how long."""
        reference = member.handle.__ray_call__.remote(whereabouts)
        running = asyncio.wrap_future(reference.future())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=self._patience_s)
                if not running.done() and is_needed and self._pool.is_empty:
                    raise ActorFailedError(f"no node had room for it within {self._patience_s:g} s")
        finally:
            running.cancel()
        member.runs_on(await answer(reference, timeout_s=self._patience_s))
