"""The groups of a run: prompt, version and shards of each; scored, learned from, drawn again when lost.

A group of iteration i is drawn by version max(0, i - max_lag), which is the one that the slots admit; naming it by
rule lets a run that goes on from a checkpoint draw the groups that were in flight exactly as before.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from learner.loop.redraw import DRAWS, redraw_if_lost
from learner.loop.setting_aside import name_if_silent, set_aside_if_void
from learner.loop.stream import GroupStream
from protocol.config.run import RunConfig
from protocol.errors import CheckpointError, ShardLostError
from protocol.messages import Adapter, LearnerState, Prompt, ScoredGroup, ScoredShard, ShardRequest
from protocol.ports import Metrics, Ports


@dataclass
class Groups:
    """Draws, scores and learns from the run's groups; keeps the versions that groups in flight are drawn with."""

    config: RunConfig
    prompts: Sequence[Prompt]
    ports: Ports
    policies: dict[int, Adapter] = field(default_factory=dict)

    @property
    def policy(self) -> Adapter:
        """The newest published version."""
        return self.policies[max(self.policies)]

    async def begin(self, recent: Sequence[Adapter]) -> None:
        """Publish the versions that the first groups are drawn with.

        Raises:
            CheckpointError: `recent` lacks one of them.
        """
        for adapter in recent:
            await self._publish(adapter)
        await self.publish()
        newest = self.policy.version
        lacking = sorted(set(range(max(0, newest - self.config.group.max_lag), newest)) - set(self.policies))
        if lacking:
            raise CheckpointError(f"a run with group.max_lag goes on with its older adapters, lacking {lacking}")

    async def publish(self) -> None:
        """Publish the learner's version, and forget the one that no group is drawn with any more."""
        await self._publish(await self.ports.learner.adapter())
        self.policies.pop(self.policy.version - self.config.group.max_lag - 1, None)

    async def state(self) -> LearnerState:
        """The learner's state with the older versions that groups in flight are drawn with."""
        state = await self.ports.learner.state()
        older = [self.policies[version] for version in sorted(self.policies) if version < state.iteration]
        return replace(state, recent=tuple(older))

    def stream(self, start: int) -> GroupStream:
        """The groups of the iterations from `start` on; as many in flight as `max_lag` allows."""
        count = self.config.group.per_iteration
        return GroupStream(
            self.produce,
            slots=count * (self.config.group.max_lag + 1),
            start=start * count,
            end=self.config.iterations * count,
        )

    async def produce(self, place: int) -> ScoredGroup:
        """The group at a place of the run, in shards."""
        iteration, group = divmod(place, self.config.group.per_iteration)
        prompt = prompt_at(self.prompts, place, seed=self.config.seed)
        members = self.config.group.shard
        policy = self.policies[max(0, iteration - self.config.group.max_lag)]
        requests = [
            ShardRequest(
                iteration=iteration,
                group=group,
                prompt=prompt,
                first_member=first,
                members=members,
                version=policy.version,
                digest=policy.digest,
            )
            for first in range(0, self.config.group.size, members)
        ]
        shards = await asyncio.gather(
            *(redraw_if_lost(partial(_score_shard, self.ports, request)) for request in requests)
        )
        name_if_silent(prompt.text, shards)
        return ScoredGroup(prompt=prompt, shards=set_aside_if_void(shards))

    async def learn(self, iteration: int, batch: Sequence[ScoredGroup]) -> Metrics:
        """Update the learner; groups that were lost with a node before it had them are drawn once more."""
        first = iteration * self.config.group.per_iteration
        for _ in range(DRAWS - 1):
            try:
                return await self.ports.learner.update(batch)
            except ShardLostError:
                batch = await asyncio.gather(*(self.produce(first + group) for group in range(len(batch))))
        return await self.ports.learner.update(batch)

    async def _publish(self, adapter: Adapter) -> None:
        await self.ports.adapters.publish(adapter)
        self.policies[adapter.version] = adapter


def prompt_at(prompts: Sequence[Prompt], place: int, *, seed: int) -> Prompt:
    """The prompt at a place of the run's endless sequence: passes over all prompts, each shuffled by (seed, pass)."""
    turn, offset = divmod(place, len(prompts))
    order = np.random.Generator(np.random.Philox(key=[seed, turn])).permutation(len(prompts))
    return prompts[order[offset]]


async def _score_shard(ports: Ports, request: ShardRequest) -> ScoredShard:
    receipt, rollout, images = await ports.rollouts.rollout(request)
    receipt.require(version=request.version, digest=request.digest)
    prompt, count = request.prompt, receipt.images
    scores = await ports.rewards.score_for_training(images, [prompt.text] * count, [prompt.metadata] * count)
    return ScoredShard(rollout=rollout, scores=scores)
