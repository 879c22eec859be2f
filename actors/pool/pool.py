"""A resizable set of like actors: an idle one takes the next call, the dead are replaced, their work is re-issued.

A member takes one call at a time, so whoever waits for a member waits at most for the calls before it, each of
which ends within its deadline. A member that was lost is ended and replaced; its call goes to the next idle member.
A caller who gives up leaves his member busy until the call has ended. Results do not depend on any of this, since a
call carries all that its answer depends on. How an actor becomes a member stands in `actors/pool/member.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from actors.pool.calls import ActorFailedError
from actors.pool.member import ActorHandle, Joining, Member, Work
from actors.pool.restarts import RestartBudget
from protocol.errors import PoolError, one_line
from protocol.messages import Adapter
from protocol.status import ActorStatus, PoolStatus

log = logging.getLogger(__name__)
Result = TypeVar("Result")
FAILURES_PER_CALL = 3
"""Members that one call may cost before it is given up: what kills every actor must not use up the whole pool."""


class ActorPool:
    """Made by the process that runs the loop; only that process calls it.

    pool = ActorPool("rollout", spawn, size=2, max_restarts=10, welcome=load_newest_weights)
    await pool.start()
    result = await pool.call(lambda actor: answer(actor.rollout.remote(request), timeout_s=60))
    pool.scale(4)                   # they join when they are ready
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
        on_failure: Callable[[ActorHandle, str], None] | None = None,
    ) -> None:
        """`on_failure` is told of every member that was lost, with the reason, before its successor is started."""
        self.name = name
        self.busy_s = 0.0
        self._size = size
        self._max_restarts = max_restarts
        self._budget = RestartBudget(f"pool {name}", limit=max_restarts, within_s=restart_window_s)
        self._on_failure = on_failure
        self._members: dict[ActorHandle, Member] = {}
        self._idle: asyncio.Queue[ActorHandle] = asyncio.Queue()
        self._patience_s = patience_s
        self._joining = Joining(self, spawn=spawn, welcome=welcome, patience_s=patience_s)
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._queue = 0
        self._failure: PoolError | None = None
        self._failed = asyncio.Event()

    @property
    def restarts(self) -> int:
        """Members lost so far."""
        return self._budget.total

    @property
    def desired(self) -> int:
        """The size that is asked for."""
        return self._size

    @property
    def has_failed(self) -> bool:
        """Whether it used up its restarts and takes no more calls."""
        return self._failure is not None

    @property
    def is_empty(self) -> bool:
        """Whether no member is ready."""
        return not self._members

    def start_with(self, size: int) -> None:
        """Begin with this many members instead of those of the config; before `start`."""
        self._size = size

    async def start(self) -> None:
        """Returns when every member is ready, or one is and the others have waited `patience_s` for a place."""
        joins = {self._joining.begin(Member(place), is_needed=True) for place in range(self._size)}
        while joins and not (self._members and all(m.state == "waiting" for m in self._joining.members)):
            done, joins = await asyncio.wait(joins, timeout=self._patience_s, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.gather(*done)
            self._require_alive()
        for join in joins:
            join.add_done_callback(self._joined)

    async def call(self, work: Work[Result]) -> Result:
        """Run `work` on the next idle member; on another one when that one dies.

        Raises:
            PoolError: the pool used up its restarts, or this work alone cost `FAILURES_PER_CALL` members.
        """
        for _ in range(FAILURES_PER_CALL):
            handle = await self._take()
            task = asyncio.ensure_future(work(handle))
            try:
                result = await asyncio.shield(task)
            except ActorFailedError as error:
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
        raise PoolError(f"pool {self.name} lost {FAILURES_PER_CALL} actors to one call, which is given up")

    async def each(self, work: Work[Any]) -> None:
        """Run `work` once on every member; one that dies is replaced, and its successor is welcomed instead."""

        async def once(handle: ActorHandle) -> None:
            try:
                await work(handle)
            except ActorFailedError as error:
                self._replace(handle, error)

        await asyncio.gather(*(once(handle) for handle in list(self._members)))
        self._require_alive()

    def scale(self, size: int) -> None:
        """Grow or shrink towards `size` members, without waiting; a busy member finishes its call before it leaves."""
        if size < 1:
            raise PoolError(f"pool {self.name} must keep at least 1 actor, got {size}")
        self._size = size
        self._joining.call_off(self._surplus)
        while self._surplus > 0 and not self._idle.empty():
            self._dismiss(self._idle.get_nowait())
        for _ in range(-self._surplus):
            self._joining.begin(Member(self._free_place()), is_needed=False).add_done_callback(self._joined)

    async def resize(self, size: int) -> None:
        """Wish for `size` members and wait until there are so many: the joins and the calls in progress end that."""
        self.scale(size)
        while len(self._members) != self._size:
            self._require_alive()
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """End all members and all who are joining."""
        self._joining.stop()
        for task in self._abandoned:
            task.cancel()
        for handle in list(self._members):
            self._dismiss(handle)

    def tell(self, handle: ActorHandle, adapter: Adapter) -> None:
        """Note that a member confirmed this adapter."""
        for member in self._known:
            if member.handle is handle:
                member.hold(adapter)

    def status(self) -> PoolStatus:
        """For the board."""
        return PoolStatus(
            name=self.name,
            desired=self._size,
            ready=len(self._members),
            busy=sum(member.state == "busy" for member in self._members.values()),
            waiting=sum(member.state == "waiting" for member in self._joining.members),
            queue=self._queue,
            restarts=self.restarts,
            max_restarts=self._max_restarts,
            trouble=self._joining.trouble,
        )

    def actors(self) -> list[ActorStatus]:
        """Every member and everyone who is joining, for the board."""
        return [member.status(self.name) for member in sorted(self._known, key=lambda member: member.place)]

    def admit(self, member: Member) -> None:
        """It is ready to work; called by its join."""
        self._members[member.handle] = member
        self._idle.put_nowait(member.handle)

    def count_restart(self, handle: ActorHandle, error: BaseException) -> float:
        """An actor was lost: seconds to wait before its successor."""
        reason = one_line(error)
        log.warning("%s actor lost (%s), restart %d", self.name, reason, self.restarts + 1)
        if self._on_failure:
            self._on_failure(handle, reason)
        try:
            return self._budget.spend(reason)
        except PoolError as failure:
            self._fail(str(failure))
            return 0.0

    @property
    def _known(self) -> list[Member]:
        return [*self._members.values(), *self._joining.members]

    @property
    def _surplus(self) -> int:
        return len(self._known) - self._size

    def _free_place(self) -> int:
        held = {member.place for member in self._known}
        return next(place for place in range(len(held) + 1) if place not in held)

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
            if isinstance(error := task.exception(), ActorFailedError):
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
        pause_s = self.count_restart(handle, error)
        if self._failure is None and self._surplus < 0:
            successor = Member(member.place, restarts=member.restarts + 1)
            self._joining.begin(successor, is_needed=True, pause_s=pause_s).add_done_callback(self._joined)

    def _joined(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"pool {self.name} could not replace an actor: {task.exception()}")

    def _dismiss(self, handle: ActorHandle) -> None:
        self._members.pop(handle, None)
        ray.kill(handle)

    def _fail(self, message: str) -> None:
        self._failure = PoolError(message)
        self._failed.set()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
