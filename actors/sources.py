"""The four ports of the training loop, served by Ray actors."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from actors.calls import DEAD, ActorLost, answer, whereabouts
from actors.learner_actor import LearnerActor
from actors.member import ActorHandle, Member
from actors.nodes import NodeLosses, loss_reporter
from actors.pool import ActorPool
from actors.reward_source import RewardPools
from actors.rollout_actor import RolloutActor
from protocol.config import RoleConfig, RunConfig
from protocol.errors import ContractError, LearnerLostError, PoolError, ShardLostError
from protocol.messages import (
    Credit,
    DrawRequest,
    Excerpt,
    LearnerState,
    PolicyWeights,
    Prompt,
    Receipt,
    ScoredGroup,
    ShardRequest,
)
from protocol.ports import Handle, Metrics, Parts
from protocol.sink import StatusSink
from protocol.status import ActorStatus, PoolStatus

log = logging.getLogger(__name__)


class RolloutPool:
    """Rollout actors: draws shards and evaluation pictures, and takes new weights to every one of them."""

    def __init__(
        self,
        config: RunConfig,
        nodes: NodeLosses,
        sink: StatusSink,
        *,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`room` returns when another shard's pictures may be drawn: reward actors that lag behind slow the drawing."""
        cluster = config.cluster
        self._room = room
        self._timeout_s = cluster.rollout.timeout_s
        self._heartbeat_s = cluster.heartbeat_s
        self._nodes = nodes
        self._newest: deque[tuple[PolicyWeights, ray.ObjectRef[Any]]] = deque(maxlen=config.held_versions)
        resources = _resources(cluster.rollout)
        self.pool = ActorPool(
            "rollout",
            lambda: RolloutActor.options(**resources, **nodes.options()).remote(config),
            size=cluster.rollout_actors,
            max_restarts=cluster.max_restarts,
            welcome=self._welcome,
            restart_window_s=cluster.restart_window_s,
            patience_s=cluster.rollout.timeout_s,
            on_loss=loss_reporter("rollout", nodes, sink),
        )

    async def sample(self, request: ShardRequest) -> tuple[Receipt, Handle, Handle]:
        """One shard, drawn by the next idle actor."""

        async def work(actor: ActorHandle) -> tuple[Receipt, Handle, Handle]:
            if self._room:
                await self._room()
            receipt, rollout, pictures = actor.sample.remote(request)
            return await self._answer(receipt, actor), rollout, pictures

        return await self.pool.call(work)

    async def draw(self, request: DrawRequest) -> tuple[Receipt, Handle]:
        """Evaluation pictures, drawn by the next idle actor."""

        async def work(actor: ActorHandle) -> tuple[Receipt, Handle]:
            receipt, pictures = actor.draw.remote(request)
            return await self._answer(receipt, actor), pictures

        return await self.pool.call(work)

    async def fetch(self, pictures: Handle) -> np.ndarray:
        """Pictures from the object store."""
        try:
            return await answer(pictures, timeout_s=self._timeout_s)
        except DEAD as error:
            raise ShardLostError(f"pictures could not be fetched: {error}") from error

    async def excerpt(self, rollout: Handle, pictures: Handle, *, members: int) -> Excerpt:
        """The first members' pictures, cut out by the next idle actor so that the rest stays where it is."""
        return await self.pool.call(lambda actor: self._answer(actor.excerpt.remote(rollout, pictures, members), actor))

    async def publish(self, weights: PolicyWeights) -> None:
        """Put the weights into the object store once and have every actor load and acknowledge them."""
        self._newest.append((weights, ray.put(weights)))
        await self.pool.each(lambda actor: self._load(actor, *self._newest[-1]))

    async def _welcome(self, actor: ActorHandle) -> None:
        self._nodes.joined(actor, await answer(actor.ping.remote(), timeout_s=self._timeout_s))
        await answer(actor.prepare.remote(), timeout_s=self._timeout_s)
        loaded = None
        while loaded is not (newest := self._newest[-1] if self._newest else None):
            for weights, reference in list(self._newest):
                await self._load(actor, weights, reference)
            loaded = newest

    async def _load(self, actor: ActorHandle, weights: PolicyWeights, reference: "ray.ObjectRef[Any]") -> None:
        held = await self._answer(actor.load.remote(reference), actor)
        if held != (weights.version, weights.digest):
            raise ContractError(
                f"a rollout actor must hold version {weights.version} ({weights.digest[:12]}), got {held}"
            )
        self.pool.tell(actor, version=weights.version, digest=weights.digest)

    async def _answer(self, reference: "ray.ObjectRef[Any]", actor: ActorHandle) -> Any:
        return await answer(reference, timeout_s=self._timeout_s, actor=actor, heartbeat_s=self._heartbeat_s)


class RemoteLearner:
    """The learner actor. Its loss is a `LearnerLostError`; `restart` makes a new one in the state of iteration 0."""

    def __init__(self, config: RunConfig, nodes: NodeLosses) -> None:
        self._config = config
        self._role = config.cluster.learner
        self._nodes = nodes
        self.busy_s = 0.0
        self._actor: ActorHandle = self._spawn()
        self.member = Member(0, handle=self._actor)

    async def start(self) -> None:
        """Returns when the actor is ready."""
        try:
            where = self._actor.__ray_call__.remote(whereabouts)
            self.member.live_at(await answer(where, timeout_s=self._role.timeout_s))
            self.member.state = "starting"
            self._nodes.joined(self._actor, await answer(self._actor.ping.remote(), timeout_s=self._role.timeout_s))
            await answer(self._actor.prepare.remote(), timeout_s=self._role.timeout_s)
            self.member.state = "idle"
        except DEAD as error:
            raise self._lost(error) from error

    async def restart(self) -> None:
        """Replace the actor; the caller gives the new one its state."""
        ray.kill(self._actor)
        self._actor = self._spawn()
        self.member = Member(0, handle=self._actor, restarts=self.member.restarts + 1)
        await self.start()

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Learn from one iteration's groups."""
        return await self._call(self._actor.update.remote(groups))

    async def weights(self) -> PolicyWeights:
        """The current adapter."""
        weights: PolicyWeights = await self._call(self._actor.weights.remote())
        self.member.hold(weights.version, weights.digest)
        return weights

    async def credit(self, group: int) -> Credit:
        """What the steps of one group of the newest update earned."""
        return await self._call(self._actor.credit.remote(group))

    async def state(self) -> LearnerState:
        """Everything needed to go on exactly."""
        return await self._call(self._actor.state.remote())

    async def restore(self, state: LearnerState) -> None:
        """Take over a saved state."""
        await self._call(self._actor.restore.remote(state))

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    def _spawn(self) -> ActorHandle:
        return LearnerActor.options(**_resources(self._role), **self._nodes.options()).remote(self._config)

    async def _call(self, reference: "ray.ObjectRef[Any]") -> Any:
        beat_s = self._config.cluster.heartbeat_s
        self.member.begin()
        try:
            result = await answer(reference, timeout_s=self._role.timeout_s, actor=self._actor, heartbeat_s=beat_s)
            self.busy_s += self.member.end()
            return result
        except DEAD as error:
            raise self._lost(error) from error

    def _lost(self, error: ActorLost) -> LearnerLostError:
        self._nodes.lost(self._actor)
        return LearnerLostError(f"the learner actor was lost: {error}")


class Fleet:
    """All actors of one run, as the loop's ports. Made by `deploy`, which also stops it."""

    def __init__(self, config: RunConfig, sink: StatusSink) -> None:
        self._config = config
        nodes = NodeLosses(within_s=config.cluster.restart_window_s)
        self.rewards = RewardPools(config, nodes, sink)
        self.rollouts = RolloutPool(config, nodes, sink, room=self.rewards.room)
        self.learner = RemoteLearner(config, nodes)
        self.parts = Parts(rollouts=self.rollouts, rewards=self.rewards, learner=self.learner, weights=self.rollouts)

    async def start(self) -> None:
        """Returns when every actor is ready."""
        await asyncio.gather(self.learner.start(), *(pool.start() for pool in self._pools.values()))

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """What the rewards have against these prompts, as far as only their actors can tell (InputError)."""
        await self.rewards.check(prompts)

    async def restart_learner(self) -> None:
        """A new learner in the state of iteration 0; the rest of the fleet goes on."""
        await self.learner.restart()

    def stop(self) -> None:
        """End every actor."""
        for pool in self._pools.values():
            pool.stop()
        self.learner.stop()

    def pools(self) -> list[PoolStatus]:
        """Every pool."""
        return [self.rollouts.pool.status(), *self.rewards.statuses()]

    def actors(self) -> list[ActorStatus]:
        """Every actor."""
        pooled = [actor for pool in self._pools.values() for actor in pool.actors()]
        return [self.learner.member.status("learner"), *pooled]

    def busy_seconds(self) -> dict[str, float]:
        """Actor seconds spent in calls so far, by pool and for the learner."""
        return {name: pool.busy_s for name, pool in self._pools.items()} | {"learner": self.learner.busy_s}

    def queues(self) -> dict[str, int]:
        """Pictures that wait for each reward."""
        return {f"pictures/{name}": health.waiting for name, health in self.rewards.health().items()}

    def wish(self, pool: str, size: int) -> None:
        """Grow or shrink a pool without waiting for it.

        Raises:
            PoolError: no such pool, or a size below 1.
        """
        if pool not in self._pools:
            raise PoolError(f"the pools are {', '.join(self._pools)}, got {pool!r}")
        self._pools[pool].wish(size)

    def shortage(self, pool: str) -> str:
        """Why actors of this pool wait for a place; asks the cluster, so call it from a thread."""
        free = ray.available_resources()
        return ", ".join(
            f"one more needs {need:g} {name} on one node, {free.get(name, 0.0):g} {name} free in the cluster"
            for name, need in self._needs(pool).items()
            if need > 0
        )

    @property
    def _pools(self) -> dict[str, ActorPool]:
        pools = (self.rollouts.pool, *self.rewards.pools.values())
        return {pool.name: pool for pool in pools}

    def _needs(self, pool: str) -> dict[str, float]:
        cluster = self._config.cluster
        if pool == "rollout":
            return {"CPU": cluster.rollout.cpus, "GPU": cluster.rollout.gpus}
        reward = self._config.rewards[pool.removeprefix("reward/")]
        cpus = cluster.reward.cpus if reward.cpus is None else reward.cpus
        gpus = cluster.reward.gpus if reward.gpus is None else reward.gpus
        return {"CPU": cpus, "GPU": gpus, **reward.resources}


def _resources(role: RoleConfig) -> Mapping[str, Any]:
    return {"num_cpus": role.cpus, "num_gpus": role.gpus}
