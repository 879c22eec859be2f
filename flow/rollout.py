"""What a rollout actor holds: a policy with verified weights."""

from collections import OrderedDict

import numpy as np
from jaxtyping import UInt8

from flow.build import build_policy
from flow.sampler import draw, sample_shard
from protocol.config import RunConfig
from protocol.errors import StaleWeightsError
from protocol.messages import DrawRequest, PolicyWeights, Receipt, Rollout, ShardRequest


class RolloutPolicy:
    """Draws with exactly the weights that a request names, or refuses.

    Keeps the newest `max_lag + 1` versions, since a request may have been admitted that many updates ago.

        rollout_policy = RolloutPolicy(config)
        digest = rollout_policy.load(weights)
        receipt, rollout, pictures = rollout_policy.sample(request)
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._policy, self._lora = build_policy(config, device=device)
        self._versions: OrderedDict[int, PolicyWeights] = OrderedDict()
        self._active: tuple[int, str] | None = None

    def load(self, weights: PolicyWeights) -> tuple[int, str]:
        """Take over weights; returns version and digest of what the transformer now holds."""
        self._active = (weights.version, self._lora.load(weights))
        self._versions[weights.version] = weights
        while len(self._versions) > self._config.group.max_lag + 1:
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
        weights = self._versions.get(version)
        if weights is None or weights.digest != digest:
            raise StaleWeightsError(
                f"a request for version {version} with digest {digest} cannot be met, holding versions"
                f" {[(v, w.digest[:8]) for v, w in self._versions.items()]}"
            )
        self._active = (version, self._lora.load(weights))
        return self._active
