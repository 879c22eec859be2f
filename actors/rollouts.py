"""Rollout actors: the Ray shell of `flow.rollout.RolloutPolicy`, and the pool that the loop asks."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray
import torch

from actors.pool.calls import DEAD, answer
from actors.pool.heartbeat import HEARTBEAT, Alive
from actors.pool.member import ActorHandle
from actors.pool.nodes import NodeLosses, loss_reporter
from actors.pool.pool import ActorPool
from flow.excerpt import excerpt_of
from flow.rollout import RolloutPolicy
from flow.runtime.device import device_of
from protocol.config.run import RunConfig
from protocol.errors import ContractError, ShardLostError
from protocol.messages import (
    DrawRequest,
    Excerpt,
    PolicyWeights,
    Receipt,
    Rollout,
    ShardRequest,
)
from protocol.ports import Handle
from protocol.sink import StatusSink


@ray.remote(**HEARTBEAT)
class RolloutActor(Alive):
    """Draws shards and evaluation pictures. One call at a time; the pool ends a call that overruns its deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.set_num_threads(config.cluster.rollout.threads)

    @ray.method
    def prepare(self) -> None:
        """Load the model. Not in the constructor: there Ray would turn the user's mistake into a dead actor."""
        self._policy = RolloutPolicy(self._config, device=device_of(self._config.cluster.rollout))

    @ray.method
    def load(self, weights: PolicyWeights) -> tuple[int, str]:
        """Take over weights; version and digest of what is now held."""
        return self._policy.load(weights)

    @ray.method(num_returns=3)
    def sample(self, request: ShardRequest) -> tuple[Receipt, Rollout, np.ndarray]:
        """One shard: receipt, trajectories, pictures; the last two stay in the object store."""
        return self._policy.sample(request)

    @ray.method(num_returns=2)
    def draw(self, request: DrawRequest) -> tuple[Receipt, np.ndarray]:
        """Pictures without exploration: receipt, pictures."""
        return self._policy.draw(request)

    @ray.method
    def excerpt(self, rollout: Rollout, pictures: np.ndarray, members: int) -> Excerpt:
        """The first members' pictures of a shard that any actor drew, small enough to show."""
        return excerpt_of(rollout, pictures, members=members)


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
        resources = {"num_cpus": cluster.rollout.cpus, "num_gpus": cluster.rollout.gpus}
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
