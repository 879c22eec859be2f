"""Learner workers: the Ray actor around `learner.update.learner.Learner`, and their group, which is the learner port.

| event                       | what the group does                                                                  |
|-----------------------------|--------------------------------------------------------------------------------------|
| a worker dies or hangs      | `LearnerFailedError`; `restart` makes a new group in the state of iteration 0, of    |
|                             | the old size, or of a smaller one that is desired                                    |
| a worker raises             | the call ends with its error at once; the next update starts from the same state     |
| a larger size is desired    | further workers start while the group goes on unchanged until all are ready          |
| one of them dies meanwhile  | another one starts; the group goes on                                                |
| they are ready, or a        | before the next update they get the state, surplus workers end, and the lanes are    |
| smaller size is desired     | distributed anew                                                                     |
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, cast

import ray
import torch

from actors.pool.alike import require_same_facts
from actors.pool.bundles import Bundles
from actors.pool.calls import HEARTBEAT, ActorFailedError, ActorHandle, Alive, Member, answer, whereabouts
from actors.pool.nodes import NodeFailures, ray_options
from actors.pool.starts import Starts
from flow.device import computing_facts, library_facts, take_device
from learner.update.lanes import Seat
from learner.update.learner import Learner
from learner.update.workers import P, Result, Work, update
from protocol.config.cluster import require_divisor
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError, PoolError
from protocol.import_path import file_digests
from protocol.messages import Adapter, Credit, LearnerState, Rollout, ScoredGroup
from protocol.ports import Metrics
from protocol.status import ActorStatus, PoolStatus

log = logging.getLogger(__name__)
LINGER_S = 2.0
"""Seconds for which the driver holds an iteration's handles after its update. Ray frees the driver's entry of an object
only together with a reference of the driver's own. If a worker drops the last reference, the entry stays until the run
ends, and holds the whole object if that is small. The workers drop theirs at the end of the update, so two seconds are
long enough."""


@ray.remote(**HEARTBEAT)
class LearnerWorker(Alive):
    """One worker of the learner group. It takes one call at a time; the caller ends a call at its deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._fetched = 0
        torch.set_num_threads(config.cluster.learner.threads)

    def prepare(self) -> dict[str, str]:
        """Load the model and return the facts that decide the bits; the constructor would hide the user's mistakes."""
        device = take_device(self._config.cluster.learner)
        self._learner = Learner(self._config, device=device, fetch=self._fetch)
        return computing_facts(device) | file_digests(self._config.own_functions)

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        """Run a method of the learner and return its result."""
        return getattr(self._learner, method)(*args, **named)

    @ray.method(num_returns=2)
    def keep(self, method: str, *args: Any, **named: Any) -> tuple[int, Any]:
        """Run a method of the learner. Return the bytes of trajectories that were fetched so far, and the result."""
        return self._fetched, self.call(method, *args, **named)

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

    async def call(self, work: Work[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Run a method of the learner and return its result.

        Raises:
            LearnerFailedError: the actor died, hangs, or did not answer in time.
        """
        return await self._busy(self.actor.call.options(name=work.__name__).remote(work.__name__, *args, **named))

    async def keep(self, work: Work[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        """Run a method of the learner and return a reference to its result.

        Raises:
            LearnerFailedError: as in `call`.
        """
        fetched, kept = self.actor.keep.options(name=work.__name__).remote(work.__name__, *args, **named)
        self.fetched = await self._busy(fetched)
        return kept

    async def ask(self, work: Work[P, Result], *args: P.args, **named: P.kwargs) -> Result:
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
    is_empty = has_failed = False
    """Read by `Starts`: further workers wait for a node as long as necessary."""

    def __init__(
        self,
        config: RunConfig,
        nodes: NodeFailures,
        *,
        bundles: Bundles | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
        actor_class: Any = LearnerWorker,
    ) -> None:
        """
        Args:
            config: its section `cluster` sets the number of workers, their resources and deadlines.
            nodes: is told where each worker runs and which ones failed.
            bundles: reserve the workers' resources; without them a worker runs wherever there is room.
            make_room: awaited before an update, when all its groups are complete.
            actor_class: class of the workers; a simulation has its own.
        """
        self._config = config
        self._actor_class = actor_class
        self._role = config.cluster.learner
        self._nodes = nodes
        self._bundles = bundles
        self._make_room = make_room
        self._desired = self._role.workers
        self._facts: dict[str, str] = {}
        self._files = file_digests(config.own_functions)
        self._restarts: dict[int, int] = {}
        self._ended_s = 0.0
        self._joining: list[RemoteWorker] = []
        self._starts = self._new_starts()
        self._workers = [self._new_worker(slot) for slot in range(self._desired)]

    @property
    def busy_s(self) -> float:
        """Seconds that all workers spent in calls so far."""
        return self._ended_s + sum(worker.busy_s for worker in self._workers)

    async def start(self) -> None:
        """Return when every worker is ready.

        Raises:
            LearnerFailedError: one of them died, or found no node in time.
            InputError: a worker would round differently from the first.
        """
        await asyncio.gather(*(self._start(worker) for worker in self._workers))
        await self._assign_seats()

    async def restart(self) -> None:
        """Replace all workers by new ones in the state of iteration 0.

        A larger size that was desired but not yet reached goes on waiting, so it cannot keep the group from starting.
        """
        for worker in self._workers:
            if worker.has_failed:
                self._nodes.failed(worker.actor)
                self._restarts[worker.member.slot] = worker.member.restarts + 1
        self.stop()
        self._joining, self._starts = [], self._new_starts()
        self._facts = {}
        self._workers = [self._new_worker(slot) for slot in range(min(self._desired, len(self._workers)))]
        await self.start()
        self.scale(self._desired)

    async def update(self, groups: "Sequence[asyncio.Future[ScoredGroup]]") -> Metrics:
        """Learn from one iteration's groups; a size that is desired and ready takes effect first."""
        await self._resize()
        if self._make_room:
            await asyncio.wait(groups)
            await self._make_room()
        began, before = time.monotonic(), [(worker.busy_s, worker.fetched) for worker in self._workers]
        metrics = await update(self._config, self._workers, groups, share=_share)
        handles = [shard.rollout for group in groups for shard in group.result().shards]
        asyncio.get_running_loop().call_later(LINGER_S, handles.clear)
        return {**metrics, **self._work(time.monotonic() - began, before)}

    async def adapter(self) -> Adapter:
        """Copy the current adapter."""
        adapter = await self._workers[0].call(Learner.adapter)
        for worker in self._workers:
            worker.member.hold(adapter)
        return adapter

    async def credit(self, group: int) -> Credit:
        """Return the credit of one group of the newest update. The call does not count as work."""
        return await self._workers[0].ask(Learner.credit, group)

    async def state(self) -> LearnerState:
        """Copy everything that is needed to resume exactly."""
        return await self._workers[0].call(Learner.state)

    async def restore(self, state: LearnerState) -> None:
        """Resume from a saved state."""
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
        starting = self._starts.members
        held = len(self._workers) + len(self._joining) + len(starting)
        self._starts.cancel(min(len(starting), held - size))
        known = {member.slot for member in self._members}
        free = (slot for slot in range(held + size) if slot not in known)
        for slot in islice(free, max(0, size - held)):
            self._starts.begin(Member(slot), is_needed=False)

    def admit(self, member: Member) -> None:
        """Keep a further worker, which is ready, until the next update."""
        self._joining.append(RemoteWorker(self._config, member))

    def count_restart(self, handle: ActorHandle, error: BaseException) -> float:  # noqa: ARG002
        """Add no pause to that of `Starts`: further workers cost no restart."""
        return 0.0

    def stop(self) -> None:
        """End every worker."""
        self._starts.stop()
        self._ended_s = self.busy_s
        for worker in (*self._workers, *self._joining):
            ray.kill(worker.actor)
            worker.busy_s = 0.0

    def status(self) -> PoolStatus:
        """Describe the group as a pool."""
        members = self._members
        return PoolStatus(
            name=self.name,
            desired=self._desired,
            ready=sum(member.state in ("idle", "busy") for member in members),
            busy=sum(member.state == "busy" for member in members),
            waiting=sum(member.state == "waiting" for member in members),
            restarts=sum(self._restarts.values()),
            max_restarts=self._config.cluster.max_restarts,
            trouble=self._starts.trouble,
        )

    def actors(self) -> list[ActorStatus]:
        """Describe every worker."""
        return [member.status(self.name) for member in self._members]

    @property
    def _members(self) -> list[Member]:
        return [*(worker.member for worker in (*self._workers, *self._joining)), *self._starts.members]

    def _new_starts(self) -> Starts:
        return Starts(self, spawn=self._spawn, prepare=self._prepare, patience_s=self._role.timeout_s)

    def _new_worker(self, slot: int) -> RemoteWorker:
        restarts = self._restarts.get(slot, 0)
        return RemoteWorker(self._config, Member(slot, restarts=restarts, handle=self._spawn(slot)))

    def _spawn(self, slot: int) -> ActorHandle:
        role = self._role
        where = self._bundles.options(slot) if self._bundles else self._nodes.options(role)
        return self._actor_class.options(**ray_options(role.reserved), **where).remote(self._config)

    async def _start(self, worker: RemoteWorker) -> None:
        timeout_s = self._role.timeout_s
        try:
            where = worker.actor.__ray_call__.remote(whereabouts)
            worker.member.runs_on(await answer(where, timeout_s=timeout_s))
            worker.member.state = "starting"
            await self._prepare(worker.member)
        except ActorFailedError as error:
            if worker.member.state == "waiting" and error.__cause__ is None:  # it is alive
                raise worker.failed(f"no node had room for it within {timeout_s:g} s: {self._rule()}") from error
            raise worker.failed(error) from error
        worker.member.state = "idle"

    def _rule(self) -> str:
        role, count = self._role, len(self._workers)
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
        facts: dict[str, str] = await answer(
            member.handle.prepare.remote(),
            timeout_s=self._role.timeout_s,
            memory_remedy=self._config.cluster.memory_remedy,
        )
        self._facts = {**(self._facts or facts), **library_facts(), **self._files}
        require_same_facts(self._facts, facts, joining=f"one on node {member.node}", role="learner workers")

    async def _resize(self) -> None:
        """Bring the group to the desired size if enough further workers are ready; otherwise they wait.

        A size that is asked for meanwhile, and workers that become ready meanwhile, wait for the next update.
        """
        desired, ready = self._desired, list(self._joining)
        missing = desired - len(self._workers)
        if missing > len(ready) or not (missing or ready):
            return
        joining, spare = ready[: max(0, missing)], ready[max(0, missing) :]
        leaving = self._workers[desired:]
        if joining and not await self._restored(joining):
            return
        self._workers, self._joining = [*self._workers[:desired], *joining], self._joining[len(ready) :]
        for worker in (*leaving, *spare):
            self._ended_s += worker.busy_s
            ray.kill(worker.actor)
        for slot, worker in enumerate(self._workers):
            worker.member.slot = slot
        await self._assign_seats()

    async def _restored(self, joining: Sequence[RemoteWorker]) -> bool:
        """Give further workers the group's state; a worker that died while it waited is replaced.

        Args:
            joining: the further workers.

        Returns:
            Whether all of them can join; if not, the update goes on with the old size.
        """
        results = await asyncio.gather(*_restoring(joining, await self.state()), return_exceptions=True)
        for worker, error in zip(joining, results, strict=True):
            if worker.has_failed:
                log.warning("a further worker has failed before it joined (%s); another one starts", error)
                self._nodes.failed(worker.actor)
                self._ended_s += worker.busy_s
                ray.kill(worker.actor)
                self._joining.remove(worker)
                self._starts.begin(Member(worker.member.slot), is_needed=False)
            elif isinstance(error, BaseException):
                raise error
        return not any(worker.has_failed for worker in joining)

    async def _assign_seats(self) -> None:
        count = len(self._workers)
        await asyncio.gather(
            *(worker.call(Learner.take_seat, Seat(at, count)) for at, worker in enumerate(self._workers))
        )

    def _work(self, seconds: float, before: Sequence[tuple[float, int]]) -> Metrics:
        """Compute how busy the workers were in an update that took `seconds`."""
        busy = [worker.busy_s - held for worker, (held, _) in zip(self._workers, before, strict=True)]
        fetched = [worker.fetched - held for worker, (_, held) in zip(self._workers, before, strict=True)]
        for worker, own, size in zip(self._workers, busy, fetched, strict=True):
            worker.member.busy_share = round(min(1.0, own / seconds), 3)
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
    held = cast(LearnerState, ray.put(state))
    return [worker.call(Learner.restore, held) for worker in workers]
