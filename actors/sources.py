"""The four ports of the training loop, served by Ray actors."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from actors.calls import DEAD, answer
from actors.learner_actor import LearnerActor
from actors.pool import ActorHandle, ActorPool
from actors.reward_source import RewardPools
from actors.rollout_actor import RolloutActor
from protocol.config import RoleConfig, RunConfig
from protocol.errors import ContractError, PoolError
from protocol.messages import (
    DrawRequest,
    LearnerState,
    PolicyWeights,
    Prompt,
    Receipt,
    ScoredGroup,
    ShardRequest,
)
from protocol.ports import Handle, Metrics, Parts

log = logging.getLogger(__name__)


class RolloutPool:
    """Rollout actors: draws shards and evaluation pictures, and takes new weights to every one of them."""

    def __init__(self, config: RunConfig, *, room: Callable[[], Awaitable[None]] | None = None) -> None:
        """`room` returns when another shard's pictures may be drawn: reward actors that lag behind slow the drawing."""
        cluster = config.cluster
        self._room = room
        self._timeout_s = cluster.rollout.timeout_s
        self._newest: deque[tuple[PolicyWeights, ray.ObjectRef[Any]]] = deque(maxlen=config.held_versions)
        remote = RolloutActor.options(**_resources(cluster.rollout))
        self.pool = ActorPool(
            "rollout",
            lambda: remote.remote(config),
            size=cluster.rollout_actors,
            max_restarts=cluster.max_restarts,
            welcome=self._welcome,
        )

    async def sample(self, request: ShardRequest) -> tuple[Receipt, Handle, Handle]:
        """One shard, drawn by the next idle actor."""

        async def work(actor: ActorHandle) -> tuple[Receipt, Handle, Handle]:
            if self._room:
                await self._room()
            receipt, rollout, pictures = actor.sample.remote(request)
            return await answer(receipt, timeout_s=self._timeout_s), rollout, pictures

        return await self.pool.call(work)

    async def draw(self, request: DrawRequest) -> tuple[Receipt, Handle]:
        """Evaluation pictures, drawn by the next idle actor."""

        async def work(actor: ActorHandle) -> tuple[Receipt, Handle]:
            receipt, pictures = actor.draw.remote(request)
            return await answer(receipt, timeout_s=self._timeout_s), pictures

        return await self.pool.call(work)

    async def fetch(self, pictures: Handle) -> np.ndarray:
        """Pictures from the object store."""
        return await answer(pictures, timeout_s=self._timeout_s)

    async def publish(self, weights: PolicyWeights) -> None:
        """Put the weights into the object store once and have every actor load and acknowledge them."""
        self._newest.append((weights, ray.put(weights)))
        await self.pool.each(lambda actor: self._load(actor, *self._newest[-1]))

    async def _welcome(self, actor: ActorHandle) -> None:
        await answer(actor.prepare.remote(), timeout_s=self._timeout_s)
        loaded = None
        while loaded is not (newest := self._newest[-1] if self._newest else None):
            for weights, reference in list(self._newest):
                await self._load(actor, weights, reference)
            loaded = newest

    async def _load(self, actor: ActorHandle, weights: PolicyWeights, reference: "ray.ObjectRef[Any]") -> None:
        held = await answer(actor.load.remote(reference), timeout_s=self._timeout_s)
        if held != (weights.version, weights.digest):
            raise ContractError(
                f"a rollout actor must hold version {weights.version} ({weights.digest[:12]}), got {held}"
            )


class RemoteLearner:
    """The learner actor. Its death ends the run; the run goes on from its newest checkpoint when started again."""

    def __init__(self, config: RunConfig) -> None:
        self._timeout_s = config.cluster.learner.timeout_s
        self._actor: ActorHandle = LearnerActor.options(**_resources(config.cluster.learner)).remote(config)

    async def start(self) -> None:
        """Returns when the actor is ready."""
        await self._call(self._actor.prepare.remote())

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Learn from one iteration's groups."""
        return await self._call(self._actor.update.remote(groups))

    async def weights(self) -> PolicyWeights:
        """The current adapter."""
        return await self._call(self._actor.weights.remote())

    async def state(self) -> LearnerState:
        """Everything needed to go on exactly."""
        return await self._call(self._actor.state.remote())

    async def restore(self, state: LearnerState) -> None:
        """Take over a saved state."""
        await self._call(self._actor.restore.remote(state))

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    async def _call(self, reference: "ray.ObjectRef[Any]") -> Any:
        try:
            return await answer(reference, timeout_s=self._timeout_s)
        except DEAD as error:
            reason = " ".join(str(error).split())[:200] or "no answer before its deadline"
            raise PoolError(f"the learner actor was lost: {reason}; start the run again to go on") from error


class Fleet:
    """All actors of one run, as the loop's ports. Made by `deploy`, which also stops it."""

    def __init__(self, config: RunConfig) -> None:
        self.rewards = RewardPools(config)
        self.rollouts = RolloutPool(config, room=self.rewards.room)
        self.learner = RemoteLearner(config)
        self.parts = Parts(rollouts=self.rollouts, rewards=self.rewards, learner=self.learner, weights=self.rollouts)

    async def start(self) -> None:
        """Returns when every actor is ready."""
        pools: list[ActorPool] = [self.rollouts.pool, *self.rewards.pools.values()]
        await asyncio.gather(self.learner.start(), *(pool.start() for pool in pools))

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """What the rewards have against these prompts, as far as only their actors can tell (InputError)."""
        await self.rewards.check(prompts)

    def stop(self) -> None:
        """End every actor."""
        for pool in (self.rollouts.pool, *self.rewards.pools.values()):
            pool.stop()
        self.learner.stop()


def _resources(role: RoleConfig) -> Mapping[str, Any]:
    return {"num_cpus": role.cpus, "num_gpus": role.gpus}
