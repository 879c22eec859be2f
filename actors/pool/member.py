"""How an actor becomes a member of a pool: it is started, waits for a node, and is welcomed.

| a join             | while it has no node                               | when it is lost or fails                  |
|--------------------|----------------------------------------------------|-------------------------------------------|
| needed: the first, | waits while other members work; after `patience_s` | counts as a restart; an error of its own  |
| a replacement      | with none of them it counts as lost                | ends the pool                             |
| wished for         | waits, until the wish changes or the pool stops    | is tried again later; the reason is shown |
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
from protocol.errors import one_line
from protocol.messages import Adapter
from protocol.status import ActorState, ActorStatus

ActorHandle = Any
"""A Ray actor; its methods are not typed here."""


@dataclass(eq=False)
class Member:
    """One place of a pool and the actor that holds it; made and changed by the pool."""

    place: int
    restarts: int = 0
    """Actors that were lost at this place."""
    handle: ActorHandle = None
    state: ActorState = "waiting"
    node: str = ""
    node_id: str = ""
    pid: int | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None
    calls: int = 0
    seen: float | None = None
    _began: float = 0.0
    _answers: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def live_at(self, place: tuple[str, str, int]) -> None:
        """It runs: host name, cluster node and process, as `actors.pool.calls.whereabouts` tells them."""
        self.node, self.node_id, self.pid = place

    def begin(self) -> None:
        """It takes a call."""
        self.state, self._began = "busy", time.monotonic()

    def end(self) -> float:
        """It answered; the seconds that it took."""
        now = time.monotonic()
        self.state, self.seen = "idle", time.time()
        self.calls += 1
        self._answers.append(now)
        return now - self._began

    def hold(self, adapter: Adapter) -> None:
        """Note that the actor confirmed this adapter."""
        self.adapter_version, self.adapter_digest, self.seen = adapter.version, adapter.digest, time.time()

    def status(self, kind: str) -> ActorStatus:
        """For the board."""
        return ActorStatus(
            name=f"{kind}-{self.place}",
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
        )

    def _per_minute(self) -> float:
        if len(self._answers) < 2:
            return 0.0
        span = time.monotonic() - self._answers[0]
        return round(60 * (len(self._answers) - 1) / span, 1) if span > 0 else 0.0


log = logging.getLogger(__name__)
Result = TypeVar("Result")
RETRY_S = (5.0, 60.0)
"""Seconds until a wished member that failed is tried again: at first, and at most (doubling)."""
Work = Callable[[ActorHandle], Awaitable[Result]]
"""One call on one actor; raises `ActorFailedError` when the actor is gone."""


class Host(Protocol):
    """What a join needs of its pool."""

    name: str

    @property
    def is_empty(self) -> bool:
        """Whether no member is ready."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether it takes nobody any more."""
        ...

    def admit(self, member: Member) -> None:
        """It is ready to work."""
        ...

    def count_restart(self, handle: ActorHandle, error: BaseException) -> float:
        """An actor was lost: seconds to wait before its successor."""
        ...


class Joining:
    """Those who are on their way into one pool, which makes this and is the only one to call it."""

    def __init__(self, pool: Host, *, spawn: Callable[[], ActorHandle], welcome: Work[Any], patience_s: float) -> None:
        self.trouble = ""
        """Why the newest wished member could not begin; empty when it could."""
        self._pool = pool
        self._spawn = spawn
        self._welcome = welcome
        self._patience_s = patience_s
        self._tasks: dict[asyncio.Task[None], Member] = {}
        self._needed: set[asyncio.Task[None]] = set()

    @property
    def members(self) -> list[Member]:
        """In the order in which they began."""
        return list(self._tasks.values())

    def begin(self, member: Member, *, is_needed: bool, pause_s: float = 0.0) -> "asyncio.Task[None]":
        """Start an actor for this place; the task ends when the pool has admitted it, or with its error."""
        joining = self._join_needed(member, pause_s) if is_needed else self._join_desired(member)
        task = asyncio.ensure_future(joining)
        self._tasks[task] = member
        if is_needed:
            self._needed.add(task)
            task.add_done_callback(self._needed.discard)
        return task

    def call_off(self, surplus: int) -> None:
        """The wished size has changed: as many as are too many do not join after all, the newest first.

        Those who are needed stay longest: a pool without members could wait for a wished one for ever.
        """
        self.trouble = ""
        newest_first = list(reversed(self._tasks))
        for task in sorted(newest_first, key=self._needed.__contains__)[: max(0, surplus)]:
            self._tasks.pop(task)
            task.cancel()

    def stop(self) -> None:
        """Nobody joins any more."""
        for task in self._tasks:
            task.cancel()

    async def _join_needed(self, member: Member, pause_s: float = 0.0) -> None:
        while not self._pool.has_failed:
            await asyncio.sleep(pause_s)
            try:
                await self._admit(member, is_needed=True)
                return
            except ActorFailedError as error:
                member.restarts += 1
                pause_s = self._pool.count_restart(member.handle, error)

    async def _join_desired(self, member: Member) -> None:
        pause_s, longest_s = RETRY_S
        while not self._pool.has_failed:
            try:
                await self._admit(member, is_needed=False)
            except Exception as error:
                self.trouble = one_line(error)
                message = "no further %s actor yet (%s); again in %.0f s"
                log.warning(message, self._pool.name, self.trouble, pause_s, exc_info=True)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                self.trouble = ""
                return

    async def _admit(self, member: Member, *, is_needed: bool) -> None:
        member.state, member.handle = "waiting", self._spawn()
        try:
            await self._place(member, is_needed=is_needed)
            member.state = "starting"
            await self._welcome(member.handle)
        except BaseException:
            if ray.is_initialized():
                ray.kill(member.handle)
            raise
        member.state, member.seen = "idle", time.time()
        self._tasks = {task: other for task, other in self._tasks.items() if other is not member}
        self._pool.admit(member)

    async def _place(self, member: Member, *, is_needed: bool) -> None:
        """Wait until the actor runs on a node; see the table above for who ends this."""
        reference = member.handle.__ray_call__.remote(whereabouts)
        running = asyncio.wrap_future(reference.future())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=self._patience_s)
                if not running.done() and is_needed and self._pool.is_empty:
                    raise ActorFailedError(f"no node had room for it within {self._patience_s:g} s")
        finally:
            running.cancel()
        member.live_at(await answer(reference, timeout_s=self._patience_s))
