"""The Ray shell of `learner.learner.Learner`."""

from collections.abc import Sequence
from dataclasses import replace

import ray
import torch

from actors.alive import HEARTBEAT, Alive
from flow.device import device_of
from learner.learner import Learner
from protocol.config import RunConfig
from protocol.messages import Credit, LearnerState, PolicyWeights, ScoredGroup
from protocol.ports import Metrics


@ray.remote(**HEARTBEAT)
class LearnerActor(Alive):
    """Owns the trained weights. One call at a time; the caller ends a call that overruns its deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.set_num_threads(config.cluster.learner.threads)

    @ray.method
    def prepare(self) -> None:
        """Load the model. Not in the constructor: there Ray would turn the user's mistake into a dead actor."""
        self._learner = Learner(self._config, device=device_of(self._config.cluster.learner))

    @ray.method
    def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Fetch the groups' trajectories from the object store and learn from them."""
        rollouts = iter(ray.get([shard.rollout for group in groups for shard in group.shards]))
        fetched = [
            replace(group, shards=tuple(replace(shard, rollout=next(rollouts)) for shard in group.shards))
            for group in groups
        ]
        return self._learner.update(fetched)

    @ray.method
    def weights(self) -> PolicyWeights:
        """The current adapter."""
        return self._learner.weights()

    @ray.method
    def credit(self, group: int) -> Credit:
        """What the steps of one group of the newest update earned."""
        return self._learner.credit(group)

    @ray.method
    def state(self) -> LearnerState:
        """Everything needed to go on exactly."""
        return self._learner.state()

    @ray.method
    def restore(self, state: LearnerState) -> None:
        """Take over a saved state."""
        self._learner.restore(state)
