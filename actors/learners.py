"""Learner workers: the Ray actor around `learner.update.learner.Learner`, and their group, which is the learner port.

| event                       | what the group does                                                                  |
|-----------------------------|--------------------------------------------------------------------------------------|
| a worker dies or hangs      | `LearnerFailedError`; `restart` makes a new group in the state of iteration 0        |
| some workers find no node   | the group begins without them; they are further workers                              |
| a worker raises             | the call ends with its error at once; the next update starts from the same state     |
| a larger size is desired    | further workers start while the group goes on unchanged                              |
| one of them dies meanwhile  | another one starts; the group goes on                                                |
| they are ready, or a        | before the next update they get the state, surplus workers end, and the lanes are    |
| smaller size is desired     | distributed anew, to the largest possible size up to the desired one                 |
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import ray
import torch

from actors.pool.alike import require_same_facts
from actors.pool.bundles import Bundles, ProcessOf
from actors.pool.calls import HEARTBEAT, ActorFailedError, ActorHandle, Alive, Member, answer
from actors.pool.nodes import NodeFailures, ray_options
from actors.pool.starts import Starts
from flow.device import computing_facts, devices_of, library_facts, take_device
from flow.models.load import FrozenModel
from learner.update.lanes import Seat
from learner.update.learner import Learner
from learner.update.workers import LearnerMethod, P, Result, update
from protocol.config.cluster import require_divisor
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError, PoolError
from protocol.ground.import_path import file_digests
from protocol.messages import Adapter, Credit, LearnerState, Rollout, ScoredGroup
from protocol.ports import Metrics
from protocol.status import ActorStatus, PoolStatus

log = logging.getLogger(__name__)
LINGER_S = 2.0
"""Seconds for which the driver holds an iteration's handles after its update, so that it drops the last reference. If a
worker dropped it, the object's entry in Ray's driver would stay until the run ends, with the object itself if that is
small. The workers drop their references at the end of the update, so two seconds are long enough."""
SETTLE_S = 10.0
"""Seconds for which a group that starts again, and has one worker, waits for nodes for the others."""


class Learning(Alive):
    """One worker of the learner group. It takes one call at a time; the caller ends a call at its deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._fetched = 0
        torch.set_num_threads(config.cluster.learner.threads)

    def prepare(self) -> dict[str, str]:
        """Load the model and return the facts that decide the bits."""
        role = self._config.cluster.learner
        device = take_device(role)
        frozen = FrozenModel(self._config.model, devices_of(role)) if role.gpus > 1 else None
        return self._load_learner(device, frozen)

    def _load_learner(self, device: str, frozen: FrozenModel | None) -> dict[str, str]:
        self._learner = Learner(self._config, device=device, frozen=frozen, fetch=self._fetch)
        return computing_facts(device) | file_digests(self._config.own_functions)

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        return getattr(self._learner, method)(*args, **named)

    @ray.method(num_returns=2)
    def keep(self, method: str, *args: Any, **named: Any) -> tuple[int, Any]:
        """Run a method of the learner. Return the bytes of trajectories that were fetched so far, and the result."""
        return self._fetched, self.call(method, *args, **named)

    def keep_each(self, method: str, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Do as `keep` does with each result of a method that has several."""
        return self._fetched, *self.call(method, *args, **named)

    def _fetch(self, handles: Sequence[Any]) -> Iterator[Rollout]:
        """Fetch trajectories in order; the next ones are fetched while the caller works on the current ones."""
        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as thread:
            fetches = (thread.submit(ray.get, handle) for handle in handles)
            coming = next(fetches, None)
            while coming:
                rollout = cast(Rollout, coming.result())
                coming = next(fetches, None)
                arrays = (rollout.latents, rollout.log_probs, rollout.means)
                self._fetched += sum(array.nbytes for array in arrays if array is not None)
                yield rollout


@ray.remote(**HEARTBEAT)
class LearnerWorker(Learning):
    """A process that learns."""


class RemoteWorker:
    """A `learner.update.workers.Worker` on Ray. What it keeps are objects in Ray's store."""

    def __init__(self, config: RunConfig, member: Member) -> None:
        self.member = member
        self.actor = member.handle
        self._answer = partial(
            answer,
            timeout_s=config.cluster.learner.timeout_s,
            actor=self.actor,
            heartbeat_s=config.cluster.heartbeat_s,
            memory_remedy=config.cluster.memory_remedy,
        )
        self.has_failed = False
        self.busy_s = 0.0
        """Seconds in calls so far."""
        self.fetched = 0
        """Bytes of trajectories fetched so far."""

    async def call(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Run a method of the learner and return its result.

        Raises:
            LearnerFailedError: the actor died, hangs, or did not answer in time.
        """
        return await self._busy(self.actor.call.options(name=work.__name__).remote(work.__name__, *args, **named))

    async def keep(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Run a method of the learner and return a reference to its result.

        Raises:
            LearnerFailedError: as in `call`.
        """
        fetched, kept = self.actor.keep.options(name=work.__name__).remote(work.__name__, *args, **named)
        self.fetched = await self._busy(fetched)
        return kept

    async def keep_each(
        self, count: int, work: LearnerMethod[P, Sequence[Result]], *args: P.args, **named: P.kwargs
    ) -> Sequence[Result]:
        """Run a method of the learner with `count` results and return a reference to each.

        Raises:
            LearnerFailedError: as in `call`.
        """
        method = self.actor.keep_each.options(name=work.__name__, num_returns=1 + count)
        fetched, *kept = method.remote(work.__name__, *args, **named)
        self.fetched = await self._busy(fetched)
        return kept

    async def call_uncounted(self, work: LearnerMethod[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Do as `call` does; the call does not count as work."""
        return await self._answered(self.actor.call.remote(work.__name__, *args, **named))

    async def _busy(self, reference: "ray.ObjectRef[Any]") -> Any:
        """Wait for a call that counts as work."""
        self.member.begin()
        try:
            result = await self._answered(reference)
        except LearnerFailedError:
            raise
        except Exception:  # the actor answered with an error and can take the next call
            self.busy_s += self.member.end()
            raise
        self.busy_s += self.member.end()
        return result

    async def _answered(self, reference: "ray.ObjectRef[Any]") -> Any:
        try:
            return await self._answer(reference)
        except ActorFailedError as error:
            raise self.failed(error) from error

    def failed(self, error: object) -> LearnerFailedError:
        """Note that the actor is dead or useless, and return the exception that says so."""
        self.has_failed = True
        return LearnerFailedError(f"learner worker {self.member.slot} failed: {error}")


class LearnerGroup:
    """The workers in the order of their seats. A dead or hanging worker raises `LearnerFailedError`."""

    name = "learner"
    has_failed = False
    """Read by `Starts`."""

    def __init__(
        self,
        config: RunConfig,
        nodes: NodeFailures,
        *,
        bundles: Bundles | None = None,
        process_of: ProcessOf | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
        actor_class: Any = LearnerWorker,
    ) -> None:
        """
        Args:
            bundles: reserve the workers' resources; without them a worker runs wherever there is room.
            process_of: makes the worker of a slot, if it rolls out too; otherwise `actor_class` does.
            make_room: awaited before an update, when all its groups are complete.
        """
        self._config = config
        self._actor_class = actor_class
        self._role = config.cluster.learner
        self._nodes = nodes
        self._bundles = bundles
        self._process_of = process_of
        self._make_room = make_room
        self._desired = self._role.workers
        self.held_for = ""
        """The role for which it is held, see `ActorPool.hold`; empty if it is not."""
        self._facts: dict[str, str] = {}
        self._files = file_digests(config.own_functions)
        self._restarts: dict[int, int] = {}
        self._ended_s = 0.0
        self._workers: list[RemoteWorker] = []
        self._near = 1
        """Workers of a node that add their sums before the nodes do, as in `learner.update.workers.update`."""
        self._joining: list[RemoteWorker] = []
        self._starts = self._new_starts()

    @property
    def busy_s(self) -> float:
        """Seconds that all workers spent in calls so far."""
        return self._ended_s + sum(worker.busy_s for worker in self._workers)

    @property
    def is_empty(self) -> bool:
        """Whether no worker is ready."""
        return not (self._workers or self._joining)

    async def start(self) -> None:
        """Return when every worker is ready, or when one is and the others have waited until their deadline for a node.

        Raises:
            LearnerFailedError: one of them died, or none found a node in time.
            InputError: a worker would round differently from the first.
        """
        await self._start(patience_s=self._role.timeout_s)

    async def _start(self, *, patience_s: float) -> None:
        members = [Member(slot, restarts=self._restarts.get(slot, 0)) for slot in range(self._size)]
        starts = {self._starts.begin(member, is_needed=True) for member in members}
        while starts:
            done, starts = await asyncio.wait(starts, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for start in done:
                if not start.cancelled():
                    start.result()
            if not done and self._joining and all(member.state == "waiting" for member in self._starts.members):
                break
        for member in members:
            self._starts.cancel(member)
        if self.is_empty:
            raise LearnerFailedError("every learner worker was lost with its node before the group began")
        await self._resize()
        self._demand()

    async def restart(self) -> None:
        """Replace all workers by new ones in the state of iteration 0; who finds no node in time joins later."""
        for worker in self._workers:
            if worker.has_failed:
                self._nodes.failed(worker.actor)
                self._restarts[worker.member.slot] = worker.member.restarts + 1
        self.stop()
        self._workers, self._joining, self._starts = [], [], self._new_starts()
        self._facts = {}
        await self._start(patience_s=SETTLE_S)

    async def update(self, groups: "Sequence[asyncio.Future[ScoredGroup]]") -> Metrics:
        """Learn from one iteration's groups; a size that is desired and ready takes effect first."""
        await self._resize()
        if self._make_room:
            await asyncio.wait(groups)
            await self._make_room()
        began, before = time.monotonic(), [(worker.busy_s, worker.fetched) for worker in self._workers]
        metrics = await update(self._config, self._workers, groups, near=self._near, share=_share)
        handles = [shard.rollout for group in groups for shard in group.result().shards]
        asyncio.get_running_loop().call_later(LINGER_S, handles.clear)
        return {**metrics, **self._work(time.monotonic() - began, before)}

    async def adapter(self) -> Adapter:
        adapter = await self._workers[0].call(Learner.adapter)
        for worker in self._workers:
            worker.member.hold(adapter)
        return adapter

    async def credit(self, group: int) -> Credit:
        """Return the credit of one group of the newest update. The call does not count as work."""
        return await self._workers[0].call_uncounted(Learner.credit, group)

    async def state(self) -> LearnerState:
        return await self._workers[0].call(Learner.state)

    async def restore(self, state: LearnerState) -> None:
        await asyncio.gather(*_restoring(self._workers, state))

    def scale(self, size: int) -> None:
        """Ask for another number of workers, without waiting for it.

        Raises:
            PoolError: the size does not divide `learner.lanes`.
        """
        try:
            require_divisor(size, lanes=self._config.learner.lanes)
        except ValueError as error:
            raise PoolError(str(error)) from None
        self._desired = size
        self._demand()

    def hold(self, role: str) -> None:
        self.held_for = role
        self._demand()

    def release(self) -> None:
        if self.held_for:
            self.held_for = ""
            self._demand()

    def give(self, member: Member) -> None:
        """End a worker for another role, for which the group is held; without it a group starts again."""
        self._starts.cancel(member)
        for worker in (*self._workers, *self._joining):
            if worker.member is member:
                self._drop(worker)

    def lose(self, nodes: Collection[str]) -> None:
        """End the workers on these nodes, which are dead, by their ids."""
        for worker in (*self._workers, *self._joining):
            if worker.member.node_id in nodes:
                self._drop(worker)

    def admit(self, member: Member) -> None:
        """Keep a further worker, which is ready, until the next update."""
        self._joining.append(RemoteWorker(self._config, member))

    def count_restart(self, handle: ActorHandle, error: BaseException) -> float:
        """Fail the start of a group whose worker died or found no node."""
        self._nodes.failed(handle)
        member = next(member for member in self._starts.members if member.handle is handle)
        self._restarts[member.slot] = member.restarts
        reason = f"{error}: {self._rule()}" if member.state == "waiting" and error.__cause__ is None else error
        raise LearnerFailedError(f"learner worker {member.slot} failed: {reason}") from error

    def stop(self) -> None:
        self._starts.stop()
        self._ended_s = self.busy_s
        for worker in (*self._workers, *self._joining):
            ray.kill(worker.actor)
            worker.busy_s = 0.0

    def status(self) -> PoolStatus:
        members = self.members
        return PoolStatus(
            name=self.name,
            desired=self._desired,
            ready=sum(member.state in ("idle", "busy") for member in members),
            busy=sum(member.state == "busy" for member in members),
            waiting=sum(member.state == "waiting" for member in members),
            restarts=sum(self._restarts.values()),
            max_restarts=self._config.cluster.max_restarts,
            held_for=self.held_for,
            trouble=self._starts.trouble,
        )

    def actors(self) -> list[ActorStatus]:
        return [member.status(self.name) for member in self.members]

    @property
    def members(self) -> list[Member]:
        """The workers that are ready or starting."""
        return [*self._ready, *self._starts.members]

    @property
    def _ready(self) -> list[Member]:
        return [worker.member for worker in (*self._workers, *self._joining)]

    @property
    def _size(self) -> int:
        """Workers to have now."""
        if not self.held_for:
            return self._desired
        return max(1, min(self._desired, sum(member.state != "waiting" for member in self.members)))

    def _demand(self) -> None:
        """Start further workers, or cancel their starts; `_resize` ends surplus ones that are ready."""
        self._starts.resize(self._ready, self._size)

    def _drop(self, worker: RemoteWorker) -> None:
        """End a worker. If it has a seat, the next call to it fails; if not, another one starts."""
        worker.member.state, worker.member.node, worker.member.node_id = "waiting", "", ""
        ray.kill(worker.actor)
        if worker in self._joining:
            self._ended_s += worker.busy_s
            self._joining.remove(worker)
            self._demand()

    def _new_starts(self) -> Starts:
        return Starts(self, spawn=self._spawn, prepare=self._prepare, patience_s=self._role.timeout_s)

    def _spawn(self, slot: int) -> ActorHandle:
        if self._process_of:
            return self._process_of(slot, self.name, self._config)
        role = self._role
        where = self._bundles.options(slot) if self._bundles else self._nodes.options(role)
        return self._actor_class.options(**ray_options(role.reserved), **where).remote(self._config)

    def _rule(self) -> str:
        role, count = self._role, self._desired
        if self._bundles:
            each = " and ".join(
                f"{need:g} {name}" for name, need in self._config.cluster.bundle_reserved.items() if need
            )
            return (
                f"each of {count} bundles of a rollout actor and a learner worker needs {each} on one node; add"
                " nodes, or lower cluster.rollout_actors and cluster.learner.workers"
            )
        return (
            f"each of {count} workers needs {role.cpus:g} CPU and {role.gpus:g} GPU on one node; add nodes, or"
            " lower cluster.learner.workers"
        )

    async def _prepare(self, member: Member) -> None:
        """Load the model, and compare the facts that decide the worker's bits with the first worker's."""
        self._nodes.joined(member.handle, member.node_id)
        prepare = member.handle.prepare_learner if self._process_of else member.handle.prepare
        facts: dict[str, str] = await answer(
            prepare.remote(),
            timeout_s=self._role.timeout_s,
            memory_remedy=self._config.cluster.memory_remedy,
        )
        self._facts = {**(self._facts or facts), **library_facts(), **self._files}
        require_same_facts(self._facts, facts, joining=f"one on node {member.node}", role="learner workers")

    async def _resize(self) -> None:
        """Bring the group as near to the desired size as its ready workers allow; the others wait.

        A size that is asked for meanwhile, and workers that become ready meanwhile, wait for the next update.
        """
        desired, ready = self._desired, sorted(self._joining, key=lambda worker: worker.member.slot)
        size = min(desired, _power_of_two(len(self._workers) + len(ready)))
        missing = max(0, size - len(self._workers))
        joining, spare = ready[:missing], ready[missing:] if size == desired else []
        workers = sorted(self._workers, key=lambda worker: worker.member.state == "waiting")  # the dead leave first
        leaving = workers[size:]
        if joining and self._workers and not await self._restored(joining):
            return
        self._workers = [*workers[:size], *joining]
        self._joining = [worker for worker in self._joining if worker not in (*joining, *spare)]
        for worker in (*leaving, *spare):
            self._ended_s += worker.busy_s
            ray.kill(worker.actor)
        if joining or leaving:
            await self._assign_seats()

    async def _restored(self, joining: Sequence[RemoteWorker]) -> bool:
        """Give further workers the group's state; a worker that died while it waited is replaced.

        Returns:
            Whether all of them can join; if not, the update goes on with the old size.
        """
        results = await asyncio.gather(*_restoring(joining, await self.state()), return_exceptions=True)
        for worker, error in zip(joining, results, strict=True):
            if worker.has_failed:
                log.warning("a further worker has failed before it joined (%s); another one starts", error)
                self._nodes.failed(worker.actor)
                self._drop(worker)
            elif isinstance(error, BaseException):
                raise error
        return not any(worker.has_failed for worker in joining)

    async def _assign_seats(self) -> None:
        """Give the workers their seats: each `near` workers of one node get a branch of the tree."""
        count, nodes = len(self._workers), Counter(worker.member.node_id for worker in self._workers)
        self._near = math.gcd(*nodes.values())
        by_node, far = sorted(self._workers, key=lambda worker: worker.member.node_id), count // self._near
        # Seats c, c + far, c + 2 far ... are a branch; `by_node` holds its workers one after the other.
        self._workers = [by_node[seat % far * self._near + seat // far] for seat in range(count)]
        await asyncio.gather(
            *(worker.call(Learner.take_seat, Seat(at, count)) for at, worker in enumerate(self._workers))
        )

    def _work(self, seconds: float, before: Sequence[tuple[float, int]]) -> Metrics:
        """Compute how busy the workers were in an update that took `seconds`."""
        busy = [worker.busy_s - earlier for worker, (earlier, _) in zip(self._workers, before, strict=True)]
        fetched = [worker.fetched - earlier for worker, (_, earlier) in zip(self._workers, before, strict=True)]
        for worker, busy_s, size in zip(self._workers, busy, fetched, strict=True):
            worker.member.busy_share = round(min(1.0, busy_s / seconds), 3)
            worker.member.fetched_bytes = size
        return {
            "update/workers": float(len(self._workers)),
            "update/busy_share": sum(busy) / (seconds * len(busy)),
            "update/busy_share_min": min(busy) / seconds,
            "update/fetched_mb": sum(fetched) / 1e6,
        }


def _share(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    """Put the groups into the object store once, whatever the number of workers."""
    return cast(Sequence[ScoredGroup], ray.put(groups))


def _restoring(workers: Sequence[RemoteWorker], state: LearnerState) -> list[Coroutine[Any, Any, None]]:
    """Put the state into the object store once, whatever the number of workers."""
    reference = cast(LearnerState, ray.put(state))
    return [worker.call(Learner.restore, reference) for worker in workers]


def _power_of_two(count: int) -> int:
    """Return the largest power of two up to a count above 0; each up to `learner.lanes` divides it."""
    return 1 << (count.bit_length() - 1)
