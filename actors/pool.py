"""A resizable set of like actors: an idle one takes the next call, the dead are replaced, their work is re-issued.

A member takes one call at a time, so whoever waits for a member waits at most for the calls before it, each of
which ends within its deadline. A member that was lost is ended and replaced; its call goes to the next idle member.
A caller who gives up leaves his member busy until the call has ended. Results do not depend on any of this, since a
call carries all that its answer depends on.

| a join             | while it has no node                               | when it is lost or fails                  |
|--------------------|----------------------------------------------------|-------------------------------------------|
| needed: the first, | waits while other members work; after `patience_s` | counts as a restart; an error of its own  |
| a replacement      | with none of them it counts as lost                | ends the pool                             |
| wished for         | waits, until the wish changes or the pool stops    | is tried again later; the reason is shown |
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray

from actors.calls import DEAD, ActorLost, answer, whereabouts
from actors.member import ActorHandle, Member
from actors.restarts import RestartBudget
from protocol.errors import PoolError
from protocol.status import ActorStatus, PoolStatus

log = logging.getLogger(__name__)
Result = TypeVar("Result")
LOSSES_PER_CALL = 3
"""Members that one call may cost before it is given up: what kills every actor must not use up the whole pool."""
RETRY_S = (5.0, 60.0)
"""Seconds until a wished member that failed is tried again: at first, and at most (doubling)."""
Work = Callable[[ActorHandle], Awaitable[Result]]
"""One call on one actor; raises one of `DEAD` when the actor is gone."""


class ActorPool:
    """Made by the process that runs the loop; only that process calls it.

    pool = ActorPool("rollout", spawn, size=2, max_restarts=10, welcome=load_newest_weights)
    await pool.start()
    result = await pool.call(lambda actor: answer(actor.sample.remote(request), timeout_s=60))
    pool.wish(4)                   # they join when they are ready
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], ActorHandle],
        *,
        size: int,
        max_restarts: int,
        welcome: Work[Any],
        restart_window_s: float = 3600.0,
        patience_s: float = 600.0,
        on_loss: Callable[[ActorHandle, str], None] | None = None,
    ) -> None:
        """`on_loss` is told of every member that was lost, with the reason, before its successor is started."""
        self.name = name
        self.busy_s = 0.0
        self._spawn = spawn
        self._size = size
        self._max_restarts = max_restarts
        self._budget = RestartBudget(f"pool {name}", limit=max_restarts, within_s=restart_window_s)
        self._on_loss = on_loss
        self._welcome = welcome
        self._patience_s = patience_s
        self._members: dict[ActorHandle, Member] = {}
        self._idle: asyncio.Queue[ActorHandle] = asyncio.Queue()
        self._joining: dict[asyncio.Task[None], Member] = {}
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._queue = 0
        self._trouble = ""
        self._failure: PoolError | None = None
        self._failed = asyncio.Event()

    @property
    def restarts(self) -> int:
        """Members lost so far."""
        return self._budget.total

    @property
    def wished(self) -> int:
        """The size that is asked for."""
        return self._size

    @property
    def has_failed(self) -> bool:
        """Whether it used up its restarts and takes no more calls."""
        return self._failure is not None

    def wish_at_start(self, size: int) -> None:
        """Begin with this many members instead of those of the config; before `start`."""
        self._size = size

    async def start(self) -> None:
        """Returns when every member is ready."""
        await asyncio.gather(*(self._begin(Member(place), is_needed=True) for place in range(self._size)))
        self._require_alive()

    async def call(self, work: Work[Result]) -> Result:
        """Run `work` on the next idle member; on another one when that one dies.

        Raises:
            PoolError: the pool used up its restarts, or this work alone cost `LOSSES_PER_CALL` members.
        """
        for _ in range(LOSSES_PER_CALL):
            handle = await self._take()
            task = asyncio.ensure_future(work(handle))
            try:
                result = await asyncio.shield(task)
            except DEAD as error:
                self._replace(handle, error)
                continue
            except asyncio.CancelledError:
                self._abandon(handle, task)
                raise
            except BaseException:
                self._give_back(handle)
                raise
            self._give_back(handle)
            return result
        raise PoolError(f"pool {self.name} lost {LOSSES_PER_CALL} actors to one call, which is given up")

    async def each(self, work: Work[Any]) -> None:
        """Run `work` once on every member; one that dies is replaced, and its successor is welcomed instead."""

        async def once(handle: ActorHandle) -> None:
            try:
                await work(handle)
            except DEAD as error:
                self._replace(handle, error)

        await asyncio.gather(*(once(handle) for handle in list(self._members)))
        self._require_alive()

    def wish(self, size: int) -> None:
        """Grow or shrink towards `size` members, without waiting; a busy member finishes its call before it leaves."""
        if size < 1:
            raise PoolError(f"pool {self.name} must keep at least 1 actor, got {size}")
        self._size = size
        self._trouble = ""
        for task in reversed(list(self._joining)):
            if self._surplus > 0:
                self._joining.pop(task)
                task.cancel()
        while self._surplus > 0 and not self._idle.empty():
            self._dismiss(self._idle.get_nowait())
        for _ in range(-self._surplus):
            self._begin(Member(self._free_place()), is_needed=False).add_done_callback(self._joined)

    async def resize(self, size: int) -> None:
        """Wish for `size` members and wait until there are so many: the joins and the calls in progress end that."""
        self.wish(size)
        while len(self._members) != self._size:
            self._require_alive()
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """End all members and all who are joining."""
        for task in (*self._joining, *self._abandoned):
            task.cancel()
        for handle in list(self._members):
            self._dismiss(handle)

    def tell(self, handle: ActorHandle, *, version: int, digest: str) -> None:
        """A member proved that it holds these weights."""
        for member in (*self._members.values(), *self._joining.values()):
            if member.handle is handle:
                member.hold(version, digest)

    def status(self) -> PoolStatus:
        """For the board."""
        return PoolStatus(
            name=self.name,
            wished=self._size,
            ready=len(self._members),
            busy=sum(member.state == "busy" for member in self._members.values()),
            waiting=sum(member.state == "waiting" for member in self._joining.values()),
            queue=self._queue,
            restarts=self.restarts,
            max_restarts=self._max_restarts,
            trouble=self._trouble,
        )

    def actors(self) -> list[ActorStatus]:
        """Every member and everyone who is joining, for the board."""
        known = (*self._members.values(), *self._joining.values())
        return [member.status(self.name) for member in sorted(known, key=lambda member: member.place)]

    @property
    def _surplus(self) -> int:
        return len(self._members) + len(self._joining) - self._size

    def _free_place(self) -> int:
        held = {member.place for member in (*self._members.values(), *self._joining.values())}
        return next(place for place in range(len(held) + 1) if place not in held)

    async def _join_needed(self, member: Member, pause_s: float = 0.0) -> None:
        while self._failure is None:
            await asyncio.sleep(pause_s)
            try:
                await self._admit(member, is_needed=True)
                return
            except DEAD as error:
                member.restarts += 1
                pause_s = self._count_restart(member.handle, error)

    async def _join_wished(self, member: Member) -> None:
        pause_s, longest_s = RETRY_S
        while self._failure is None:
            try:
                await self._admit(member, is_needed=False)
            except Exception as error:
                self._trouble = _reason(error)
                message = "no further %s actor yet (%s); again in %.0f s"
                log.warning(message, self.name, self._trouble, pause_s, exc_info=True)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                self._trouble = ""
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
        self._joining = {task: other for task, other in self._joining.items() if other is not member}
        self._members[member.handle] = member
        self._idle.put_nowait(member.handle)

    async def _place(self, member: Member, *, is_needed: bool) -> None:
        """Wait until the actor runs on a node; see the table above for who ends this."""
        reference = member.handle.__ray_call__.remote(whereabouts)
        running = asyncio.wrap_future(reference.future())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=self._patience_s)
                if not running.done() and is_needed and not self._members:
                    raise ActorLost(f"no node had room for it within {self._patience_s:g} s")
        finally:
            running.cancel()
        member.live_at(await answer(reference, timeout_s=self._patience_s))

    async def _take(self) -> ActorHandle:
        self._queue += 1
        try:
            while True:
                self._require_alive()
                waiting = asyncio.ensure_future(self._idle.get())
                failing = asyncio.ensure_future(self._failed.wait())
                try:
                    await asyncio.wait({waiting, failing}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    if waiting.done():
                        self._idle.put_nowait(waiting.result())
                    raise
                finally:
                    failing.cancel()
                    waiting.cancel()
                if waiting.done() and waiting.result() in self._members:
                    self._members[waiting.result()].begin()
                    return waiting.result()
        finally:
            self._queue -= 1

    def _give_back(self, handle: ActorHandle) -> None:
        member = self._members.get(handle)
        if member is None:
            return
        self.busy_s += member.end()
        if self._surplus > 0:
            self._dismiss(handle)
        else:
            self._idle.put_nowait(handle)

    def _abandon(self, handle: ActorHandle, task: "asyncio.Task[Any]") -> None:
        """The caller gave up; the member works on, and is free again only when its call has ended."""

        def ended(_: object) -> None:
            self._abandoned.discard(task)
            if task.cancelled():
                return
            if isinstance(error := task.exception(), DEAD):
                self._replace(handle, error)
            else:
                self._give_back(handle)

        self._abandoned.add(task)
        task.add_done_callback(ended)

    def _replace(self, handle: ActorHandle, error: BaseException) -> None:
        member = self._members.get(handle)
        if member is None:
            return
        self._dismiss(handle)
        pause_s = self._count_restart(handle, error)
        if self._failure is None and self._surplus < 0:
            successor = Member(member.place, restarts=member.restarts + 1)
            self._begin(successor, is_needed=True, pause_s=pause_s).add_done_callback(self._joined)

    def _begin(self, member: Member, *, is_needed: bool, pause_s: float = 0.0) -> "asyncio.Task[None]":
        joining = self._join_needed(member, pause_s) if is_needed else self._join_wished(member)
        task = asyncio.ensure_future(joining)
        self._joining[task] = member
        return task

    def _joined(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"pool {self.name} could not replace an actor: {task.exception()}")

    def _dismiss(self, handle: ActorHandle) -> None:
        self._members.pop(handle, None)
        ray.kill(handle)

    def _count_restart(self, handle: ActorHandle, error: BaseException) -> float:
        """Seconds to wait before the successor."""
        reason = _reason(error)
        log.warning("%s actor lost (%s), restart %d", self.name, reason, self.restarts + 1)
        if self._on_loss:
            self._on_loss(handle, reason)
        try:
            return self._budget.spend(reason)
        except PoolError as failure:
            self._fail(str(failure))
            return 0.0

    def _fail(self, message: str) -> None:
        self._failure = PoolError(message)
        self._failed.set()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
