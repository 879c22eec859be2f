"""The learner actor: the Ray shell of `learner.update.learner.Learner`, and `RemoteLearner`, which serves the port."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from actors.pool.calls import HEARTBEAT, ActorFailedError, Alive, answer, whereabouts
from actors.pool.member import ActorHandle, Member
from actors.pool.nodes import NodeFailures
from flow.device import device_of
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from protocol.messages import (
    Adapter,
    Credit,
    LearnerState,
    ScoredGroup,
)
from protocol.ports import Metrics


@ray.remote(**HEARTBEAT)
class LearnerActor(Alive):
    """Owns the trained adapter. It takes one call at a time; the caller ends a call at its deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.set_num_threads(config.cluster.learner.threads)

    @ray.method
    def prepare(self) -> None:
        """Load the model; in the constructor Ray would turn the user's mistake into a dead actor."""
        self._learner = Learner(self._config, device=device_of(self._config.cluster.learner))

    @ray.method
    def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Fetch the groups' trajectories from the object store and learn from them."""
        handles: list[Any] = [shard.rollout for group in groups for shard in group.shards]
        rollouts = iter(ray.get(handles))
        fetched = [
            replace(group, shards=tuple(replace(shard, rollout=next(rollouts)) for shard in group.shards))
            for group in groups
        ]
        return self._learner.update(fetched)

    @ray.method
    def adapter(self) -> Adapter:
        """Copy the current adapter."""
        return self._learner.adapter()

    @ray.method
    def credit(self, group: int) -> Credit:
        """Tell the credit of one group of the newest update."""
        return self._learner.credit(group)

    @ray.method
    def state(self) -> LearnerState:
        """Copy everything that is needed to resume exactly."""
        return self._learner.state()

    @ray.method
    def restore(self, state: LearnerState) -> None:
        """Resume from a saved state."""
        self._learner.restore(state)


class RemoteLearner:
    """The learner port. A dead actor is a `LearnerFailedError`; `restart` makes one in the state of iteration 0."""

    def __init__(self, config: RunConfig, nodes: NodeFailures) -> None:
        self._config = config
        self._role = config.cluster.learner
        self._nodes = nodes
        self.busy_s = 0.0
        self._actor: ActorHandle = self._spawn()
        self.member = Member(0, handle=self._actor)

    async def start(self) -> None:
        """Return when the actor is ready."""
        try:
            where = self._actor.__ray_call__.remote(whereabouts)
            self.member.runs_on(await answer(where, timeout_s=self._role.timeout_s))
            self.member.state = "starting"
            self._nodes.joined(self._actor, await answer(self._actor.ping.remote(), timeout_s=self._role.timeout_s))
            await answer(self._actor.prepare.remote(), timeout_s=self._role.timeout_s)
            self.member.state = "idle"
        except ActorFailedError as error:
            raise self._failed(error) from error

    async def restart(self) -> None:
        """Replace the actor; the caller restores its state."""
        ray.kill(self._actor)
        self._actor = self._spawn()
        self.member = Member(0, handle=self._actor, restarts=self.member.restarts + 1)
        await self.start()

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Learn from one iteration's groups."""
        return await self._call(self._actor.update.remote(groups))

    async def adapter(self) -> Adapter:
        """Copy the current adapter."""
        adapter: Adapter = await self._call(self._actor.adapter.remote())
        self.member.hold(adapter)
        return adapter

    async def credit(self, group: int) -> Credit:
        """Tell the credit of one group of the newest update. Asked beside the loop, it does not count as work."""
        return await self._answer(self._actor.credit.remote(group))

    async def state(self) -> LearnerState:
        """Copy everything that is needed to resume exactly."""
        return await self._call(self._actor.state.remote())

    async def restore(self, state: LearnerState) -> None:
        """Resume from a saved state."""
        await self._call(self._actor.restore.remote(state))

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    def _spawn(self) -> ActorHandle:
        return LearnerActor.options(num_cpus=self._role.cpus, num_gpus=self._role.gpus, **self._nodes.options()).remote(
            self._config
        )

    async def _call(self, reference: "ray.ObjectRef[Any]") -> Any:
        self.member.begin()
        try:
            result = await self._answer(reference)
        except LearnerFailedError:
            raise
        except Exception:  # the actor answered with an error and takes the next call
            self.busy_s += self.member.end()
            raise
        self.busy_s += self.member.end()
        return result

    async def _answer(self, reference: "ray.ObjectRef[Any]") -> Any:
        beat_s = self._config.cluster.heartbeat_s
        try:
            return await answer(reference, timeout_s=self._role.timeout_s, actor=self._actor, heartbeat_s=beat_s)
        except ActorFailedError as error:
            raise self._failed(error) from error

    def _failed(self, error: ActorFailedError) -> LearnerFailedError:
        self._nodes.failed(self._actor)
        return LearnerFailedError(f"the learner actor failed: {error}")
