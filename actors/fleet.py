"""All actors of one run on Ray; they serve the four ports of the loop."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from actors.learners import LearnerGroup
from actors.pool.bundles import Bundles
from actors.pool.nodes import NodeFailures, free_resources
from actors.pool.pool import ActorPool
from actors.rewards.pool import RewardPools
from actors.rollouts import RolloutPool
from protocol.config.run import RunConfig
from protocol.errors import PoolError
from protocol.messages import Adapter, Prompt
from protocol.ports import EvaluationPorts, Ports
from protocol.sink import StatusSink
from protocol.status import FIXED_SIZE, ActorStatus, PoolStatus

log = logging.getLogger(__name__)


class RayEvaluators:
    """The rollout and reward actors, which are enough for an evaluation. `deploy` makes and stops them."""

    _bundles: Bundles | None = None

    def __init__(self, config: RunConfig, sink: StatusSink) -> None:
        self._config = config
        self._nodes = NodeFailures(within_s=config.cluster.restart_window_s)
        self.rewards = RewardPools(config, self._nodes, sink)
        self.rollouts = RolloutPool(config, self._nodes, sink, bundles=self._bundles)

    @property
    def ports(self) -> EvaluationPorts:
        """The ports that they serve."""
        return EvaluationPorts(rollouts=self.rollouts, rewards=self.rewards, adapters=self.rollouts)

    async def start(self) -> None:
        """Return when every actor is ready."""
        await asyncio.gather(self.rollouts.pool.start(), self._start_scorers())

    async def _start_scorers(self) -> None:
        if self._bundles:
            await self._bundles.reserved()
        await asyncio.gather(*(pool.start() for pool in self.rewards.pools.values()))

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise InputError for a prompt that a scorer cannot score, where only its actors can tell."""
        await self.rewards.check(prompts)

    async def first_adapter(self) -> Adapter:
        """Copy the adapter of iteration 0, before anything is published."""
        return await self.rollouts.first_adapter()

    def stop(self) -> None:
        """End every actor."""
        for pool in self._pools.values():
            pool.stop()

    @property
    def _pools(self) -> dict[str, ActorPool]:
        pools = (self.rollouts.pool, *self.rewards.pools.values())
        return {pool.name: pool for pool in pools}


class RayFleet(RayEvaluators):
    """A `protocol.ports.Fleet` on Ray. `deploy` makes and stops it."""

    def __init__(self, config: RunConfig, sink: StatusSink) -> None:
        self._bundles = Bundles(config.cluster) if config.cluster.is_colocated else None
        super().__init__(config, sink)
        make_room = self.rollouts.rest if config.cluster.offload else None
        self.learner = LearnerGroup(config, self._nodes, bundles=self._bundles, make_room=make_room)

    @property
    def ports(self) -> Ports:
        """The four ports; the same objects before and after a restart of the learner."""
        return Ports(rollouts=self.rollouts, rewards=self.rewards, learner=self.learner, adapters=self.rollouts)

    async def start(self) -> None:
        """Return when every actor is ready."""
        await asyncio.gather(self.learner.start(), super().start())

    async def restart_learner(self) -> None:
        """Replace the learner group by one in the state of iteration 0; all other actors go on."""
        await self.learner.restart()

    def stop(self) -> None:
        """End every actor."""
        super().stop()
        self.learner.stop()
        if self._bundles:
            self._bundles.remove()

    def pools(self) -> list[PoolStatus]:
        """Describe every pool."""
        both = [self.rollouts.pool.status(), self.learner.status()]
        rollouts, learner = (pool.model_copy(update={"is_resizable": not self._bundles}) for pool in both)
        return [rollouts, *self.rewards.statuses(), learner]

    def actors(self) -> list[ActorStatus]:
        """Describe every actor."""
        pooled = [actor for pool in self._pools.values() for actor in pool.actors()]
        return [*self.learner.actors(), *pooled]

    def busy_seconds(self) -> dict[str, float]:
        """Sum the seconds that actors spent in calls so far, by pool and for `learner`."""
        return {name: pool.busy_s for name, pool in self._pools.items()} | {"learner": self.learner.busy_s}

    def queues(self) -> dict[str, int]:
        """Count the images that wait for each reward."""
        return {f"images/{name}": reward.queue.waiting for name, reward in self.rewards.rewards.items()}

    def scale(self, pool: str, size: int) -> None:
        """Grow or shrink a pool or the learner group without waiting for it.

        Raises:
            PoolError: no such pool, or a size that it cannot have.
        """
        resizable: dict[str, ActorPool | LearnerGroup] = {**self._pools, self.learner.name: self.learner}
        if pool not in resizable:
            raise PoolError(f"the pools are {', '.join(resizable)}, got {pool!r}")
        if self._bundles and pool in (self.rollouts.pool.name, self.learner.name):
            raise PoolError(f"{pool} cannot be scaled to {size}: {FIXED_SIZE}")
        resizable[pool].scale(size)

    def shortage(self, pool: str) -> str:
        """Say why actors of this pool wait for a node; empty if one has room. Takes time: call it in a thread."""
        cluster, free = self._config.cluster, list(free_resources().values())
        role = {self.rollouts.pool.name: cluster.rollout, self.learner.name: cluster.learner}.get(pool)
        if role is None:
            return shortage_of(self._config.rewards[pool.removeprefix("reward/")].reserved(cluster.reward), free)
        return self._bundles.shortage(free) if self._bundles else shortage_of(role.reserved, free)


def shortage_of(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """Say which resources one more actor lacks.

    Args:
        needs: what one actor reserves, by resource.
        nodes: free resources of each node.

    Returns:
        One line; empty if a node has room.
    """
    if any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in nodes):
        return ""
    free = {name: sum(node.get(name, 0.0) for node in nodes) for name in needs}
    return ", ".join(
        f"one more needs {need:g} {name} on one node, {free[name]:g} {name} free in the cluster"
        + (" but not together on one node" if free[name] >= need else "")
        for name, need in needs.items()
        if need > 0
    )
