"""A resizable set of equal actors. An idle actor takes the next call; a dead one is replaced, and its call made again.

A member works on one call at a time, and each call has a deadline; so a caller waits at most for the calls before its
own. A member that fails is killed and replaced; its call goes to the next idle member. If a caller gives up, its member
stays busy until the call has ended. A call carries everything that its answer depends on, so no result depends on any
of this. `actors/pool/starts.py` describes how an actor starts.

With a `depth` of 2 a busy member also holds its next call, so that it begins without a round trip to this process. A
member gets a call in advance only while at least as many further calls wait as there are members; otherwise one member
could be idle while another has two calls. The deadline of a held call begins with its turn. If the member fails, only
the call in progress counts the failure (`FAILURES_PER_CALL`); the held call is made again.

A pool is held while another role has no actor (`actors/room.py`): it then withdraws the starts that have no node, and
replaces only its last member. Afterwards it grows to its desired size again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import ray

from actors.pool.calls import TURN, ActorFailedError, ActorHandle, Call, Member, Work
from actors.pool.restarts import RestartBudget
from actors.pool.starts import Prepare, Starts
from protocol.errors import PoolError, one_line
from protocol.messages import Adapter
from protocol.status import ActorStatus, PoolStatus

log = logging.getLogger(__name__)
Result = TypeVar("Result")
AHEAD = 2
"""Depth of a pool whose members hold the call in progress and the next one."""
FAILURES_PER_CALL = 3
"""A call is given up after it cost this many members: a call that kills every actor must not use up the pool."""


class ActorPool:
    """The pool's part in the process that runs the loop; only that process calls it.

    pool = ActorPool("rollout", spawn, size=2, max_restarts=10, prepare=load_model)
    await pool.start()
    result = await pool.call(lambda actor: answer(actor.rollout.remote(request), timeout_s=60))
    pool.scale(4)                   # returns at once
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[int], ActorHandle],
        *,
        size: int,
        max_restarts: int,
        prepare: Prepare,
        restart_window_s: float = 3600.0,
        patience_s: float = 600.0,
        depth: int = 1,
        report_failure: Callable[[ActorHandle, str], None] | None = None,
    ) -> None:
        """
        Args:
            name: `rollout` or `reward/<scorer>`.
            max_restarts: failures within the window that the pool survives.
            prepare: makes the running actor of a member ready to work.
            restart_window_s: seconds after which a failure no longer counts.
            patience_s: seconds that a needed member may wait for a node.
            depth: calls that a member may hold, the one in progress included.
            report_failure: called with every failed member and the reason, before its successor starts.
        """
        self.name = name
        self.busy_s = 0.0
        self.desired = size
        """The size that was asked for."""
        self.held_for = ""
        """The role for which it is held; empty if it is not."""
        self._max_restarts = max_restarts
        self._budget = RestartBudget(f"pool {name}", limit=max_restarts, within_s=restart_window_s)
        self._report_failure = report_failure
        self._depth = depth
        self._members: dict[ActorHandle, Member] = {}
        self._waiting: deque[asyncio.Future[Call]] = deque()
        self._patience_s = patience_s
        self._starts = Starts(self, spawn=spawn, prepare=prepare, patience_s=patience_s)
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._failure: PoolError | None = None

    @property
    def restarts(self) -> int:
        """Members that failed so far."""
        return self._budget.total

    @property
    def has_failed(self) -> bool:
        """Whether it used up its restarts and takes no more calls."""
        return self._failure is not None

    @property
    def is_empty(self) -> bool:
        return not self._members

    @property
    def ready(self) -> int:
        return len(self._members)

    async def start(self) -> None:
        """Return when every member is ready, or when one is and the others have waited `patience_s` for a node."""
        starts = {self._starts.begin(Member(slot), is_needed=True) for slot in range(self.desired)}
        while starts and not (self._members and all(m.state == "waiting" for m in self._starts.members)):
            done, starts = await asyncio.wait(starts, timeout=self._patience_s, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.gather(*(start for start in done if not start.cancelled()))
            self._require_alive()
        for start in starts:
            start.add_done_callback(self._start_ended)

    async def call(self, work: Work[Result]) -> Result:
        """Run `work` on the next idle member, and again on another one if that one dies.

        Raises:
            PoolError: the pool used up its restarts, or this work cost `FAILURES_PER_CALL` members.
        """
        failures, reason = 0, ""
        while failures < FAILURES_PER_CALL:
            call = await self._take()
            task = call.task = asyncio.create_task(_in_turn(work, call))
            try:
                result = await asyncio.shield(task)
            except ActorFailedError as error:
                reason = one_line(error)
                self._replace(call.member.handle, error)
            except asyncio.CancelledError:
                if not call.has_failed or _is_cancelled():
                    self._abandon(call, task)
                    raise
            except BaseException:
                self._end(call)
                raise
            else:
                self._budget.succeed()
                self._end(call)
                return result
            failures += call.is_blamed
        raise PoolError(f"pool {self.name} gave up a call that cost {FAILURES_PER_CALL} actors: {reason}")

    async def on_every_member(self, work: Work[Any]) -> None:
        """Run `work` once on every member; a member that dies is replaced, and its successor is prepared instead."""

        async def once(handle: ActorHandle) -> None:
            try:
                await work(handle)
            except ActorFailedError as error:
                self._replace(handle, error)

        await asyncio.gather(*(once(handle) for handle in list(self._members)))
        self._require_alive()

    def scale(self, size: int) -> None:
        """Grow or shrink to `size` members without waiting; a busy member finishes its call before it leaves."""
        if size < 1:
            raise PoolError(f"pool {self.name} must keep at least 1 actor, got {size}")
        self.desired = size
        self._resize()

    def hold(self, role: str) -> None:
        self.held_for = role
        self._resize()

    def release(self) -> None:
        if self.held_for:
            self.held_for = ""
            self._resize()

    def give(self, member: Member) -> None:
        """End a member for another role, for which the pool is held; its calls are made again on other members."""
        if member.handle in self._members:
            self._remove(member, is_blamed=False)
        else:
            self._starts.cancel(member)

    def lose(self, nodes: Collection[str]) -> None:
        """Replace the members on these nodes, which are dead, by their ids."""
        for member in [member for member in self._members.values() if member.node_id in nodes]:
            self._replace(member.handle, ActorFailedError(f"its node died: {member.node}"))

    def stop(self) -> None:
        """End all members and all starts."""
        self._starts.stop()
        for task in self._abandoned:
            task.cancel()
        for handle in list(self._members):
            self._dismiss(handle)

    def confirm(self, handle: ActorHandle, adapter: Adapter) -> None:
        """Note that a member confirmed this adapter."""
        for member in self.members:
            if member.handle is handle:
                member.hold(adapter)

    def status(self) -> PoolStatus:
        return PoolStatus(
            name=self.name,
            desired=self.desired,
            ready=self.ready,
            busy=sum(member.state == "busy" for member in self._members.values()),
            waiting=sum(member.state == "waiting" for member in self._starts.members),
            queue=sum(not waiting.done() for waiting in self._waiting),
            restarts=self.restarts,
            max_restarts=self._max_restarts,
            held_for=self.held_for,
            trouble=self._starts.trouble,
        )

    def actors(self) -> list[ActorStatus]:
        """Describe every member for the status that is ready or starting, not members that wait to start."""
        known = [member for member in self.members if member.handle is not None or member.restarts]
        return [member.status(self.name) for member in sorted(known, key=lambda member: member.slot)]

    def admit(self, member: Member) -> None:
        self._members[member.handle] = member
        self._hand_out()

    def count_restart(self, handle: ActorHandle, error: BaseException) -> float:
        reason = one_line(error)
        level = logging.INFO if self._report_failure else logging.WARNING  # the callback makes it an event
        log.log(level, "%s actor failed (%s), restart %d", self.name, reason, self.restarts + 1)
        if self._report_failure:
            self._report_failure(handle, reason)
        try:
            return self._budget.spend(reason)
        except PoolError as failure:
            self._fail(str(failure))
            return 0.0

    @property
    def members(self) -> list[Member]:
        """The members that are ready or starting."""
        return [*self._members.values(), *self._starts.members]

    @property
    def _size(self) -> int:
        """Members to have now."""
        if not self.held_for:
            return self.desired
        return max(1, min(self.desired, sum(member.state != "waiting" for member in self.members)))

    @property
    def _surplus(self) -> int:
        return len(self.members) - self._size

    def _resize(self) -> None:
        if self.has_failed:
            return
        for start in self._starts.resize(list(self._members.values()), self._size):
            start.add_done_callback(self._start_ended)
        for member in [member for member in self._members.values() if not member.line][: max(0, self._surplus)]:
            self._dismiss(member.handle)

    async def _take(self) -> Call:
        """Wait for a call on a member."""
        self._require_alive()
        waiting: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._hand_out()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and not waiting.exception():
                self._end(waiting.result())
            raise

    def _hand_out(self) -> None:
        """Give idle members the calls that have waited longest, then give busy members their next call in advance."""
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            member = self._next_member()
            if member is None:
                return
            call = Call(member, asyncio.get_running_loop().create_future())
            member.line.append(call)
            if len(member.line) == 1:
                self._begin_first(member)
            self._waiting.popleft().set_result(call)

    def _next_member(self) -> Member | None:
        """Choose an idle member, or the busy one with the oldest call, which will probably be idle next."""
        members = self._members.values()
        if idle := [member for member in members if not member.line]:
            return min(idle, key=lambda member: member.began)
        if self._surplus > 0 or len(self._waiting) <= len(members):
            return None
        open_ones = (member for member in members if len(member.line) < self._depth)
        return min(open_ones, key=lambda member: member.began, default=None)

    def _begin_first(self, member: Member) -> None:
        member.begin()
        if not member.line[0].turn.done():
            member.line[0].turn.set_result(None)

    def _end(self, call: Call) -> None:
        """Note that a call has ended; its member goes on with its next call, takes another one, or leaves."""
        member = call.member
        if call not in member.line or member.handle not in self._members:
            return
        was_first = call is member.line[0]
        member.line.remove(call)
        if was_first:
            self.busy_s += member.end()
        if member.line and was_first:
            self._begin_first(member)
        if not member.line and self._surplus > 0:
            self._dismiss(member.handle)
        self._hand_out()

    def _abandon(self, call: Call, task: "asyncio.Task[Any]") -> None:
        """Keep the member busy after its caller gave up, until the call has ended."""

        def ended(_: object) -> None:
            self._abandoned.discard(task)
            if task.cancelled():
                return
            if isinstance(error := task.exception(), ActorFailedError):
                self._replace(call.member.handle, error)
            else:
                self._end(call)

        self._abandoned.add(task)
        task.add_done_callback(ended)

    def _replace(self, handle: ActorHandle, error: BaseException) -> None:
        member = self._members.get(handle)
        if member is None:
            return
        self._remove(member, is_blamed=True)
        pause_s = self.count_restart(handle, error)
        if self._failure is None and self._surplus < 0:
            successor = Member(member.slot, restarts=member.restarts + 1)
            self._starts.begin(successor, is_needed=True, pause_s=pause_s).add_done_callback(self._start_ended)

    def _remove(self, member: Member, *, is_blamed: bool) -> None:
        """End a member before its calls are answered; its first call may be to blame and answers with its error."""
        for position, call in enumerate(member.line):
            call.is_blamed, call.has_failed = is_blamed and position == 0, True
            if call.task and not call.is_blamed:
                call.task.cancel()
        self._dismiss(member.handle)

    def _start_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"pool {self.name} could not replace an actor: {task.exception()}")

    def _dismiss(self, handle: ActorHandle) -> None:
        self._members.pop(handle, None)
        ray.kill(handle)

    def _fail(self, message: str) -> None:
        self._failure = PoolError(message)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(PoolError(message))
        self._waiting.clear()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure


def _is_cancelled() -> bool:
    """Tell whether the running task itself was cancelled, and not only something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _in_turn(work: Work[Result], call: Call) -> Result:
    """Run `work` in a task that knows its turn."""
    TURN.set(call.turn)
    return await work(call.member.handle)
