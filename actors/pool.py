"""A resizable set of like actors: an idle one takes the next call, the dead are replaced, their work is re-issued.

A member takes one call at a time, so whoever waits for a member waits at most for the calls before it, each of
which ends within its deadline. A member that was lost is ended and replaced; its call goes to the next idle member.
A caller who gives up leaves his member busy until the call has ended. Results do not depend on any of this, since a
call carries all that its answer depends on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray

from actors.calls import DEAD
from actors.restarts import RestartBudget
from protocol.errors import PoolError

log = logging.getLogger(__name__)
Result = TypeVar("Result")
LOSSES_PER_CALL = 3
"""Members that one call may cost before it is given up: what kills every actor must not use up the whole pool."""
ActorHandle = Any
"""A Ray actor; its methods are not typed here."""
Work = Callable[[ActorHandle], Awaitable[Result]]
"""One call on one actor; raises one of `DEAD` when the actor is gone."""


class ActorPool:
    """Made by the process that runs the loop; only that process calls it.

    pool = ActorPool("rollout", spawn, size=2, max_restarts=10, welcome=load_newest_weights)
    await pool.start()
    result = await pool.call(lambda actor: answer(actor.sample.remote(request), timeout_s=60))
    await pool.resize(4)
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
        on_loss: Callable[[ActorHandle, str], None] | None = None,
    ) -> None:
        """`on_loss` is told of every member that was lost, with the reason, before its successor is started."""
        self.name = name
        self._spawn = spawn
        self._size = size
        self._budget = RestartBudget(f"pool {name}", limit=max_restarts, within_s=restart_window_s)
        self._welcome = welcome
        self._on_loss = on_loss
        self._members: set[ActorHandle] = set()
        self._idle: asyncio.Queue[ActorHandle] = asyncio.Queue()
        self._joining: set[asyncio.Task[None]] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._failure: PoolError | None = None
        self._failed = asyncio.Event()

    @property
    def restarts(self) -> int:
        """Members lost so far."""
        return self._budget.total

    async def start(self) -> None:
        """Returns when every member is ready."""
        await asyncio.gather(*(self._join() for _ in range(self._size)))
        self._require_alive()

    async def call(self, work: Work[Result]) -> Result:
        """Run `work` on the next idle member; on another one when that one dies.

        Raises:
            PoolError: the pool used up its restarts, or this work alone cost `LOSSES_PER_CALL` members.
        """
        for _ in range(LOSSES_PER_CALL):
            member = await self._take()
            task = asyncio.ensure_future(work(member))
            try:
                result = await asyncio.shield(task)
            except DEAD as error:
                self._replace(member, error)
                continue
            except asyncio.CancelledError:
                self._abandon(member, task)
                raise
            except BaseException:
                self._give_back(member)
                raise
            self._give_back(member)
            return result
        raise PoolError(f"pool {self.name} lost {LOSSES_PER_CALL} actors to one call, which is given up")

    async def each(self, work: Work[Any]) -> None:
        """Run `work` once on every member; one that dies is replaced, and its successor is welcomed instead."""

        async def once(member: ActorHandle) -> None:
            try:
                await work(member)
            except DEAD as error:
                self._replace(member, error)

        await asyncio.gather(*(once(member) for member in list(self._members)))
        self._require_alive()

    async def resize(self, size: int) -> None:
        """Grow or shrink to `size` members; a busy member finishes its call before it leaves."""
        if size < 1:
            raise PoolError(f"pool {self.name} must keep at least 1 actor, got {size}")
        joining, self._size = size - self._size, size
        if joining > 0:
            await asyncio.gather(*(self._join() for _ in range(joining)))
        for _ in range(-joining):
            self._dismiss(await self._take())

    @property
    def has_failed(self) -> bool:
        """Whether it used up its restarts and takes no more calls."""
        return self._failure is not None

    def stop(self) -> None:
        """End all members and all who are joining."""
        for task in (*self._joining, *self._abandoned):
            task.cancel()
        for member in list(self._members):
            self._dismiss(member)

    async def _join(self, pause_s: float = 0.0) -> None:
        while self._failure is None:
            await asyncio.sleep(pause_s)
            member = self._spawn()
            try:
                await self._welcome(member)
            except DEAD as error:
                ray.kill(member)
                pause_s = self._count_restart(member, error)
                continue
            except BaseException:
                if ray.is_initialized():
                    ray.kill(member)
                raise
            self._members.add(member)
            self._idle.put_nowait(member)
            return

    async def _take(self) -> ActorHandle:
        while True:
            self._require_alive()
            waiting = asyncio.ensure_future(self._idle.get())
            failing = asyncio.ensure_future(self._failed.wait())
            try:
                await asyncio.wait({waiting, failing}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if waiting.done():
                    self._give_back(waiting.result())
                raise
            finally:
                failing.cancel()
                waiting.cancel()
            if waiting.done() and waiting.result() in self._members:
                return waiting.result()

    def _give_back(self, member: ActorHandle) -> None:
        if member in self._members:
            self._idle.put_nowait(member)

    def _abandon(self, member: ActorHandle, task: "asyncio.Task[Any]") -> None:
        """The caller gave up; the member works on, and is free again only when its call has ended."""

        def ended(_: object) -> None:
            self._abandoned.discard(task)
            if task.cancelled():
                return
            if isinstance(error := task.exception(), DEAD):
                self._replace(member, error)
            else:
                self._give_back(member)

        self._abandoned.add(task)
        task.add_done_callback(ended)

    def _replace(self, member: ActorHandle, error: BaseException) -> None:
        if member not in self._members:
            return
        self._dismiss(member)
        pause_s = self._count_restart(member, error)
        if self._failure is None:
            task = asyncio.ensure_future(self._join(pause_s))
            self._joining.add(task)
            task.add_done_callback(self._joined)

    def _joined(self, task: "asyncio.Task[None]") -> None:
        self._joining.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"pool {self.name} could not replace an actor: {task.exception()}")

    def _dismiss(self, member: ActorHandle) -> None:
        self._members.discard(member)
        ray.kill(member)

    def _count_restart(self, member: ActorHandle, error: BaseException) -> float:
        """Seconds to wait before the successor."""
        reason = str(error)
        log.warning("%s actor lost (%s), restart %d", self.name, reason, self.restarts + 1)
        if self._on_loss:
            self._on_loss(member, reason)
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
