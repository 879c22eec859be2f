"""The reward port of the training loop: a pool of reward actors for each scorer, their answers mixed."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from actors.pool.calls import answer
from actors.pool.member import ActorHandle
from actors.pool.nodes import NodeFailures, failure_reporter
from actors.pool.pool import ActorPool
from actors.rewards.actor import RewardActor
from actors.rewards.pool import RewardHealth, RewardPool
from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.messages import Metadata, Prompt, Scores
from protocol.ports import ImagesHandle, Metrics
from protocol.sink import StatusSink
from protocol.status import PoolStatus
from rewards.mixture import mix, with_observed

FAILURES = ("retried", "failed_calls", "missing", "dropped", "paused_s")
"""Counts of `RewardHealth` that are metrics when they are not 0."""


class RewardPools:
    """One pool of reward actors for each scorer; the scores of those that train are mixed."""

    def __init__(self, config: RunConfig, nodes: NodeFailures, sink: StatusSink) -> None:
        self._config = config
        self._role = config.cluster.reward
        self._nodes = nodes
        self._sink = sink
        self.rewards = {name: self._make_reward(name, reward) for name, reward in config.rewards.items()}

    @property
    def pools(self) -> dict[str, ActorPool]:
        """The actors of each reward by its name; a pool that was paused may be another one afterwards."""
        return {name: reward.pool for name, reward in self.rewards.items()}

    async def score_for_training(
        self, images: ImagesHandle, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> Scores:
        """The mixture of the scorers that train."""
        answers = await self._ask(self._config.reward_weights, images, prompts, metadata)
        return mix(answers, self._config.reward_weights)

    async def score_for_evaluation(
        self, images: ImagesHandle, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> Scores:
        """The mixture, and beside it the readings of the scorers that only evaluate."""
        answers = await self._ask(self.rewards, images, prompts, metadata)
        trained = {name: answers.pop(name) for name in self._config.reward_weights}
        return with_observed(mix(trained, self._config.reward_weights), answers)

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Ask the scorers that only their own environment can make whether they can score these prompts."""
        apart = [name for name, reward in self._config.rewards.items() if reward.runtime_env]
        await asyncio.gather(*(self.rewards[name].check(prompts) for name in apart))

    def health(self) -> dict[str, RewardHealth]:
        """Each reward's queue, counts and pause."""
        return {name: reward.health() for name, reward in self.rewards.items()}

    def statuses(self) -> list[PoolStatus]:
        """Each reward's actors for the board, with the reason of a pause."""
        return [reward.status() for reward in self.rewards.values()]

    def failures(self) -> Metrics:
        """Count what went wrong since the start, by name; empty if nothing did."""
        return {
            f"reward_server/{name}/{failure}": float(count)
            for name, health in self.health().items()
            for failure, count in asdict(health).items()
            if failure in FAILURES and count
        }

    async def _ask(
        self, names: Iterable[str], images: ImagesHandle, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> dict[str, Scores]:
        asked = list(names)
        answers = await asyncio.gather(*(self.rewards[name].score(images, prompts, metadata) for name in asked))
        return dict(zip(asked, answers, strict=True))

    def _make_reward(self, name: str, reward: RewardConfig) -> RewardPool:
        timeout_s = reward.timeout_s or self._role.timeout_s
        cluster, options = self._config.cluster, _options(reward, self._config)

        def spawn() -> ActorHandle:
            return RewardActor.options(**options, **self._nodes.options()).remote(reward, self._role.threads)

        def make() -> ActorPool:
            return ActorPool(
                f"reward/{name}",
                spawn,
                size=reward.actors,
                max_restarts=cluster.max_restarts,
                welcome=self._welcome,
                restart_window_s=cluster.restart_window_s,
                patience_s=timeout_s,
                on_failure=failure_reporter(f"reward/{name}", self._nodes, self._sink),
            )

        return RewardPool(name, reward, make, timeout_s=timeout_s, heartbeat_s=cluster.heartbeat_s)

    async def _welcome(self, actor: ActorHandle) -> None:
        self._nodes.joined(actor, await answer(actor.ping.remote(), timeout_s=self._role.timeout_s))
        await answer(actor.prepare.remote(), timeout_s=self._role.timeout_s)


def _options(reward: RewardConfig, config: RunConfig) -> dict[str, Any]:
    role = config.cluster.reward
    options: dict[str, Any] = {
        "num_cpus": role.cpus if reward.cpus is None else reward.cpus,
        "num_gpus": role.gpus if reward.gpus is None else reward.gpus,
        "resources": reward.resources,
    }
    return options | ({"runtime_env": reward.runtime_env} if reward.runtime_env else {})
