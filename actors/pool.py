"""A resizable set of like actors: an idle one takes the next call, the dead are replaced, their work is re-issued.

A member takes one call at a time, so whoever waits for a member waits at most for the calls before it, each of
which ends within `timeout_s`. A member that died or overran its deadline is ended and replaced; its call goes to the
next idle member. Results do not depend on any of this, since a call carries all that its answer depends on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray

from actors.calls import DEAD
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
    ) -> None:
        self.name = name
        self.restarts = 0
        self._spawn = spawn
        self._size = size
        self._max_restarts = max_restarts
        self._welcome = welcome
        self._members: set[ActorHandle] = set()
        self._idle: asyncio.Queue[ActorHandle] = asyncio.Queue()
        self._joining: set[asyncio.Task[None]] = set()
        self._failure: PoolError | None = None
        self._failed = asyncio.Event()

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
            try:
                result = await work(member)
            except DEAD as error:
                self._replace(member, error)
                continue
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
        for task in self._joining:
            task.cancel()
        for member in list(self._members):
            self._dismiss(member)

    async def _join(self) -> None:
        while self._failure is None:
            member = self._spawn()
            try:
                await self._welcome(member)
            except DEAD as error:
                self._count_restart(error)
                ray.kill(member)
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

    def _replace(self, member: ActorHandle, error: BaseException) -> None:
        if member not in self._members:
            return
        self._dismiss(member)
        self._count_restart(error)
        if self._failure is None:
            task = asyncio.ensure_future(self._join())
            self._joining.add(task)
            task.add_done_callback(self._joined)

    def _joined(self, task: "asyncio.Task[None]") -> None:
        self._joining.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"pool {self.name} could not replace an actor: {task.exception()}")

    def _dismiss(self, member: ActorHandle) -> None:
        self._members.discard(member)
        ray.kill(member)

    def _count_restart(self, error: BaseException) -> None:
        self.restarts += 1
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        log.warning("%s actor lost (%s), restart %d of %d", self.name, reason, self.restarts, self._max_restarts)
        if self.restarts > self._max_restarts:
            self._fail(f"pool {self.name} used up its {self._max_restarts} restarts; last loss: {reason}")

    def _fail(self, message: str) -> None:
        self._failure = PoolError(message)
        self._failed.set()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
