"""Starts the members of a pool.

An actor is spawned, waits for a node, prepares itself (loads its model or scorer) and is then admitted to the pool.

| a start             | while it has no node                            | when the actor dies or raises              |
|---------------------|-------------------------------------------------|--------------------------------------------|
| needed: a first     | waits while other members work; without any, it | a death counts as a restart; an error that |
| member, a successor | counts as failed after `patience_s`             | the actor raises ends the pool             |
| desired: any other  | waits until the desired size changes            | is tried again; `trouble` has the reason   |

At most `JOINING` desired members of a pool start at one time, so that no desired size slows the run; the others wait
without an actor.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, islice
from typing import Any, Protocol

import ray

from actors.pool.calls import ActorFailedError, ActorHandle, Member, answer, whereabouts
from actors.pool.restarts import backoff_s
from protocol.errors import one_line

log = logging.getLogger(__name__)
RETRY_S = (5.0, 60.0)
"""Seconds until a desired member that failed is started again: the first pause, and the longest."""
JOINING = 8
"""Desired members of a pool that start at one time."""
Prepare = Callable[[Member], Awaitable[Any]]
"""Makes the running actor of a member ready to work."""


class StartingPool(Protocol):
    """The part of a pool that a start needs."""

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
        self, pool: StartingPool, *, spawn: Callable[[int], ActorHandle], prepare: Prepare, patience_s: float
    ) -> None:
        """
        Args:
            patience_s: seconds to wait for a node if no other member works.
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
        return list(self._tasks.values())

    def begin(self, member: Member, *, is_needed: bool, pause_s: float = 0.0) -> "asyncio.Task[None]":
        """Start an actor in the member's slot.

        Args:
            is_needed: see the table above.
            pause_s: seconds to wait first.

        Returns:
            A task that ends when the pool has admitted the member, or with its error.
        """
        start = self._start_needed(member, pause_s) if is_needed else self._start_desired(member)
        task = asyncio.ensure_future(start)
        self._tasks[task] = member
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever awaits it raises its error
        if is_needed:
            self._needed.add(task)
            task.add_done_callback(self._needed.discard)
        return task

    def resize(self, ready: Sequence[Member], size: int) -> "list[asyncio.Task[None]]":
        """Cancel starts, or begin desired ones in free slots, so that `size` members are ready or starting.

        Members without a node are cancelled first, desired before needed, the newest first. In another order an empty
        pool could wait forever for a desired member.

        Args:
            ready: the members that are ready; they stay, also if there are more than `size`.

        Returns:
            The starts that it began.
        """
        surplus = len(ready) + len(self._tasks) - size
        if surplus:
            self.trouble = ""
        newest_first = reversed(list(self._tasks.items()))
        order = sorted(newest_first, key=lambda start: (start[1].state != "waiting", start[0] in self._needed))
        for task, _ in order[: max(0, surplus)]:
            self._tasks.pop(task)
            task.cancel()
        taken = {member.slot for member in (*ready, *self.members)}
        free = (slot for slot in count() if slot not in taken)
        return [self.begin(Member(slot), is_needed=False) for slot in islice(free, max(0, -surplus))]

    def cancel(self, member: Member) -> None:
        for task in [task for task, other in self._tasks.items() if other is member]:
            self._tasks.pop(task)
            task.cancel()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _start_needed(self, member: Member, pause_s: float) -> None:
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
            await self._prepare(member)
        except BaseException:
            if ray.is_initialized():
                ray.kill(member.handle)
            raise
        member.state, member.last_seen = "idle", time.time()
        self._tasks = {task: other for task, other in self._tasks.items() if other is not member}
        self._pool.admit(member)

    async def _wait_for_node(self, member: Member, *, is_needed: bool) -> None:
        """Wait until the actor runs on a node; how long is in the table above."""
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
