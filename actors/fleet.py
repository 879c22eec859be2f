"""All actors of one run on Ray; they serve the four ports of the loop."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from actors.joint import JointProcesses
from actors.learners import LearnerGroup
from actors.pool.bundles import Bundles
from actors.pool.calls import Member, answer
from actors.pool.nodes import NodeFailures, free_resources
from actors.pool.pool import ActorPool
from actors.rewards.pool import RewardPools
from actors.rollouts import RolloutPool
from actors.room import Role, Room, has_room
from protocol.config.run import RunConfig
from protocol.errors import PoolError
from protocol.messages import Adapter, Prompt
from protocol.ports import EvaluationPorts, Ports
from protocol.sink import StatusSink
from protocol.status import FIXED_SIZE, ActorStatus, PoolStatus

log = logging.getLogger(__name__)
MEASURED_S = 5.0
"""Seconds between two measurements of what the actors use, and the longest for one."""


class RayEvaluators:
    """The rollout and reward actors, which are enough for an evaluation. `deploy` makes and stops them."""

    _bundles: Bundles | None = None
    _processes: JointProcesses | None = None
    _watching: "tuple[asyncio.Task[None], ...]" = ()

    def __init__(self, config: RunConfig, sink: StatusSink) -> None:
        config = config.for_another_folder()
        self._config = config
        self._nodes = NodeFailures(within_s=config.cluster.restart_window_s)
        self.rewards = RewardPools(config, self._nodes, sink)
        process_of = self._processes.of if self._processes else None
        self.rollouts = RolloutPool(config, self._nodes, sink, bundles=self._bundles, process_of=process_of)

    @property
    def ports(self) -> EvaluationPorts:
        return EvaluationPorts(rollouts=self.rollouts, rewards=self.rewards, adapters=self.rollouts)

    async def start(self) -> None:
        await asyncio.gather(self.rollouts.pool.start(), self._start_scorers())
        room = Room(lambda: [*self._roles.values()], reserved=self._reserved)
        self._watching = (asyncio.create_task(room.watch()), asyncio.create_task(self._measure()))

    async def _measure(self) -> None:
        """Measure every actor again and again; one that does not answer keeps its last measurement."""
        while True:
            members = [member for role in self._roles.values() for member in role.members]
            await asyncio.gather(*map(_measured, members))
            await asyncio.sleep(MEASURED_S)

    async def _start_scorers(self) -> None:
        if self._bundles:
            await self._bundles.reserved()
        await asyncio.gather(*(pool.start() for pool in self.rewards.pools.values()))

    async def check(self, prompts: Sequence[Prompt]) -> None:
        await self.rewards.check(prompts)

    async def first_adapter(self) -> Adapter:
        """Copy the adapter of iteration 0, before anything is published."""
        return await self.rollouts.first_adapter()

    def stop(self) -> None:
        for task in self._watching:
            task.cancel()
        for pool in self._pools.values():
            pool.stop()

    @property
    def _roles(self) -> Mapping[str, Role]:
        """The roles by name, the most needed one first."""
        return self._pools

    def _reserved(self, role: str) -> Mapping[str, float]:
        """Return what one actor of a role reserves outside bundles, by resource."""
        cluster = self._config.cluster
        if role.startswith("reward/"):
            return self._config.rewards[role.removeprefix("reward/")].reserved(cluster.reward)
        return {} if self._bundles else cluster.roles[role].reserved

    @property
    def _pools(self) -> dict[str, ActorPool]:
        pools = (self.rollouts.pool, *self.rewards.pools.values())
        return {pool.name: pool for pool in pools}


class RayFleet(RayEvaluators):
    """A `protocol.ports.Fleet` on Ray. `deploy` makes and stops it."""

    def __init__(self, config: RunConfig, sink: StatusSink) -> None:
        self._bundles = Bundles(config.cluster) if config.cluster.is_colocated else None
        self._processes = JointProcesses(self._bundles) if self._bundles and config.cluster.is_joint else None
        super().__init__(config, sink)
        config = self._config
        self.learner = LearnerGroup(
            config,
            self._nodes,
            bundles=self._bundles,
            process_of=self._processes.of if self._processes else None,
            make_room=self.rollouts.rest if config.cluster.offload else None,
        )

    @property
    def ports(self) -> Ports:
        return Ports(rollouts=self.rollouts, rewards=self.rewards, learner=self.learner, adapters=self.rollouts)

    async def start(self) -> None:
        await asyncio.gather(self.learner.start(), super().start())

    async def restart_learner(self) -> None:
        """Replace the learner group by one in the state of iteration 0; all other actors go on.

        Actors that wait for a node withdraw, since they would take its room. Rollout actors that are learner workers
        too are replaced with them.
        """
        for pool in self._pools.values():
            pool.hold(self.learner.name)
        if self._processes:
            self._processes.forget()
            for member in self.rollouts.pool.members:
                self.rollouts.pool.give(member)
        await self.learner.restart()

    def stop(self) -> None:
        super().stop()
        self.learner.stop()
        if self._bundles:
            self._bundles.remove()

    def pools(self) -> list[PoolStatus]:
        both = [self.rollouts.pool.status(), self.learner.status()]
        rollouts, learner = (pool.model_copy(update={"is_resizable": not self._bundles}) for pool in both)
        return [rollouts, *self.rewards.statuses(), learner]

    def actors(self) -> list[ActorStatus]:
        pooled = [actor for pool in self._pools.values() for actor in pool.actors()]
        return [*self.learner.actors(), *pooled]

    def busy_seconds(self) -> dict[str, float]:
        return {name: pool.busy_s for name, pool in self._pools.items()} | {"learner": self.learner.busy_s}

    def queues(self) -> dict[str, int]:
        """Count the images that wait for each reward."""
        return {f"images/{name}": reward.queue.waiting for name, reward in self.rewards.rewards.items()}

    def scale(self, pool: str, size: int) -> None:
        """Grow or shrink a pool or the learner group without waiting for it.

        Raises:
            PoolError: no such pool, or a size that it cannot have.
        """
        if pool not in self._roles:
            raise PoolError(f"the pools are {', '.join(self._roles)}, got {pool!r}")
        if self._bundles and pool in (self.rollouts.pool.name, self.learner.name):
            raise PoolError(f"{pool} cannot be scaled to {size}: {FIXED_SIZE}")
        self._roles[pool].scale(size)

    def shortage(self, pool: str) -> str:
        free = list(free_resources().values())
        if self._bundles and not pool.startswith("reward/"):
            return self._bundles.shortage(free)
        return shortage_of(self._reserved(pool), free)

    @property
    def _roles(self) -> Mapping[str, Role]:
        return {self.learner.name: self.learner, **self._pools}


async def _measured(member: Member) -> None:
    if member.handle is not None and member.state != "waiting":
        with suppress(Exception):  # whoever calls the actor for its work learns why it does not answer
            member.usage = await answer(member.handle.usage.remote(), timeout_s=MEASURED_S)


def shortage_of(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """Say which resources one more actor lacks.

    Returns:
        One line; empty if a node has room.
    """
    if any(has_room(needs, node) for node in nodes):
        return ""
    free = {name: sum(node.get(name, 0.0) for node in nodes) for name in needs}
    return ", ".join(
        f"one more needs {need:g} {name} on one node, {free[name]:g} {name} free in the cluster"
        + (" but not together on one node" if free[name] >= need else "")
        for name, need in needs.items()
        if need > 0
    )
