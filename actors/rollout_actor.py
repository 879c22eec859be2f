"""The Ray shell of `flow.rollout.RolloutPolicy`."""

import numpy as np
import ray
import torch

from actors.alive import HEARTBEAT, Alive
from flow.device import device_of
from flow.excerpt import excerpt_of
from flow.rollout import RolloutPolicy
from protocol.config import RunConfig
from protocol.messages import DrawRequest, Excerpt, PolicyWeights, Receipt, Rollout, ShardRequest


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
