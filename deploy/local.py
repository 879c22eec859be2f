"""The same loop in one process without Ray: for debugging and tests. The ports are served by the plain classes.

All computation happens on one thread of its own, so the event loop stays free for Ctrl-C, and torch's thread count
is that of the role whose turn it is.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from flow.device import device_of
from flow.rollout import RolloutPolicy
from flow.threads import torch_threads
from learner.learner import Learner
from protocol.config import RoleConfig, RunConfig
from protocol.errors import ContractError
from protocol.messages import (
    DrawRequest,
    LearnerState,
    Metadata,
    PolicyWeights,
    Prompt,
    Receipt,
    Rollout,
    ScoredGroup,
    Scores,
    ShardRequest,
)
from protocol.ports import Metrics, Parts
from rewards.failure import settle
from rewards.mixture import mix, with_observed
from rewards.scorer import build_scorer

Result = TypeVar("Result")


class LocalFleet:
    """All four ports in this process; a handle is the message itself."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self.parts = Parts(rollouts=self, rewards=self, learner=self, weights=self)

    async def start(self) -> None:
        """Load the model twice, as rollout actor and learner would, and the scorers."""
        cluster = self._config.cluster
        self._rollout = await self._run(
            cluster.rollout, lambda: RolloutPolicy(self._config, device=device_of(cluster.rollout))
        )
        await self.restart_learner()
        self._scorers = {
            name: build_scorer(reward.scorer, **reward.args) for name, reward in self._config.rewards.items()
        }

    async def restart_learner(self) -> None:
        """A new learner in the state of iteration 0."""
        role = self._config.cluster.learner
        self._learner = await self._run(role, lambda: Learner(self._config, device=device_of(role)))

    def stop(self) -> None:
        """Let the computation in progress end, and no other begin."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def sample(self, request: ShardRequest) -> tuple[Receipt, Rollout, np.ndarray]:
        """One shard's receipt, trajectories and pictures."""
        return await self._run(self._config.cluster.rollout, lambda: self._rollout.sample(request))

    async def draw(self, request: DrawRequest) -> tuple[Receipt, np.ndarray]:
        """Evaluation pictures."""
        return await self._run(self._config.cluster.rollout, lambda: self._rollout.draw(request))

    async def fetch(self, pictures: np.ndarray) -> np.ndarray:
        """The handle is the pictures."""
        return pictures

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Ask the scorers that are not made before the run whether they can score these prompts."""
        for name, reward in self._config.rewards.items():
            if reward.runtime_env:
                self._scorers[name].check(prompts)

    async def reward(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """The mixture of the scorers that train."""
        return mix(await self._ask(self._config.weights, images, prompts, metadata), self._config.weights)

    async def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """The mixture, and beside it the readings of the scorers that only evaluate."""
        answers = await self._ask(self._scorers, images, prompts, metadata)
        trained = {name: answers.pop(name) for name in self._config.weights}
        return with_observed(mix(trained, self._config.weights), answers)

    def troubles(self) -> Metrics:
        """A scorer in this process is asked once; what it cannot score stands in the rewards' own metrics."""
        return {}

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Learn from one iteration's groups."""
        return await self._run(self._config.cluster.learner, lambda: self._learner.update(groups))

    async def weights(self) -> PolicyWeights:
        """The current adapter."""
        return self._learner.weights()

    async def state(self) -> LearnerState:
        """Everything needed to go on exactly."""
        return self._learner.state()

    async def restore(self, state: LearnerState) -> None:
        """Take over a saved state."""
        self._learner.restore(state)

    async def publish(self, weights: PolicyWeights) -> None:
        """Load the weights into the rollout policy and compare what it then holds."""
        held = await self._run(self._config.cluster.rollout, lambda: self._rollout.load(weights))
        if held != (weights.version, weights.digest):
            raise ContractError(f"the rollout policy must hold version {weights.version}, got {held}")

    async def _ask(
        self, names: Iterable[str], images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> dict[str, Scores]:
        """Each scorer is asked once; `pause` ends the run here, since nobody else could mend this process."""
        role, answers = self._config.cluster.reward, {}
        for name in names:
            config = self._config.rewards[name]
            if config.on_failure == "pause":
                config = config.model_copy(update={"on_failure": "fail"})
            scores = await self._run(role, lambda s=self._scorers[name]: s.score(images, prompts, metadata))
            answers[name] = settle(name, config, scores)
        return answers

    async def _run(self, role: RoleConfig, work: Callable[[], Result]) -> Result:
        def timed() -> Result:
            with torch_threads(role.threads):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
