"""What a rollout actor holds: a policy with verified weights."""

from collections import OrderedDict

import numpy as np
from jaxtyping import UInt8

from flow.build import build_policy
from flow.sampler import draw, sample_shard
from protocol.config.run import RunConfig
from protocol.errors import StaleWeightsError
from protocol.messages import DrawRequest, PolicyWeights, Receipt, Rollout, ShardRequest


class RolloutPolicy:
    """Draws with exactly the weights that a request names, or refuses.

    Keeps the newest `held_versions` adapters, since a request may have been admitted some updates ago, or ask for the
    running mean of a version.

        rollout_policy = RolloutPolicy(config)
        digest = rollout_policy.load(weights)
        receipt, rollout, pictures = rollout_policy.sample(request)
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._policy, self._lora = build_policy(config, device=device)
        self._versions: OrderedDict[tuple[int, str], PolicyWeights] = OrderedDict()
        self._active: tuple[int, str] | None = None

    def load(self, weights: PolicyWeights) -> tuple[int, str]:
        """Take over weights; returns version and digest of what the transformer now holds."""
        self._active = (weights.version, self._lora.load(weights))
        key = weights.version, weights.digest
        self._versions[key] = weights
        self._versions.move_to_end(key)
        while len(self._versions) > self._config.held_versions:
            self._versions.popitem(last=False)
        return self._active

    def sample(self, request: ShardRequest) -> tuple[Receipt, Rollout, UInt8[np.ndarray, "I height width 3"]]:
        """One shard's receipt, trajectories and pictures, drawn with the requested weights."""
        held = self._activate(request.version, request.digest)
        rollout, pictures = sample_shard(self._policy, request, self._config)
        return Receipt(version=held[0], digest=held[1], pictures=len(pictures)), rollout, pictures

    def draw(self, request: DrawRequest) -> tuple[Receipt, UInt8[np.ndarray, "B height width 3"]]:
        """A receipt and pictures without exploration, drawn with the requested weights."""
        held = self._activate(request.version, request.digest)
        pictures = draw(self._policy, request)
        return Receipt(version=held[0], digest=held[1], pictures=len(pictures)), pictures

    def _activate(self, version: int, digest: str) -> tuple[int, str]:
        """Version and digest of what the transformer holds now: the requested ones."""
        if self._active is not None and self._active == (version, digest):
            return self._active
        weights = self._versions.get((version, digest))
        if weights is None:
            raise StaleWeightsError(
                f"a request for version {version} with digest {digest} cannot be met, holding versions"
                f" {[(held, own[:8]) for held, own in self._versions]}"
            )
        self._active = (version, self._lora.load(weights))
        return self._active
