"""What a rollout actor holds: a policy with verified adapter."""

from collections import OrderedDict

import numpy as np
from jaxtyping import UInt8

from flow.build import build_policy
from flow.sampler import generate, rollout_shard
from protocol.config.run import RunConfig
from protocol.errors import StaleAdapterError
from protocol.messages import Adapter, GenerateRequest, Receipt, Rollout, ShardRequest


class RolloutPolicy:
    """Draws with exactly the adapter that a request names, or refuses.

    Keeps the newest `held_adapters` adapters, since a request may have been admitted some updates ago, or ask for the
    running mean of a version.

        rollout_policy = RolloutPolicy(config)
        digest = rollout_policy.load(adapter)
        receipt, rollout, images = rollout_policy.rollout(request)
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._policy, self._lora = build_policy(config, device=device)
        self._versions: OrderedDict[tuple[int, str], Adapter] = OrderedDict()
        self._active: tuple[int, str] | None = None

    def load(self, adapter: Adapter) -> tuple[int, str]:
        """Take over adapter; returns version and digest of what the transformer now holds."""
        self._active = (adapter.version, self._lora.load(adapter))
        key = adapter.version, adapter.digest
        self._versions[key] = adapter
        self._versions.move_to_end(key)
        while len(self._versions) > self._config.held_adapters:
            self._versions.popitem(last=False)
        return self._active

    def rollout(self, request: ShardRequest) -> tuple[Receipt, Rollout, UInt8[np.ndarray, "I height width 3"]]:
        """One shard's receipt, trajectories and images, drawn with the requested adapter."""
        held = self._activate(request.adapter_version, request.adapter_digest)
        rollout, images = rollout_shard(self._policy, request, self._config)
        return Receipt(adapter_version=held[0], adapter_digest=held[1], images=len(images)), rollout, images

    def generate(self, request: GenerateRequest) -> tuple[Receipt, UInt8[np.ndarray, "B height width 3"]]:
        """A receipt and images without exploration, drawn with the requested adapter."""
        held = self._activate(request.adapter_version, request.adapter_digest)
        images = generate(self._policy, request)
        return Receipt(adapter_version=held[0], adapter_digest=held[1], images=len(images)), images

    def _activate(self, version: int, digest: str) -> tuple[int, str]:
        """Version and digest of what the transformer holds now: the requested ones."""
        if self._active is not None and self._active == (version, digest):
            return self._active
        adapter = self._versions.get((version, digest))
        if adapter is None:
            raise StaleAdapterError(
                f"a request for version {version} with digest {digest} cannot be met, holding versions"
                f" {[(held, own[:8]) for held, own in self._versions]}"
            )
        self._active = (version, self._lora.load(adapter))
        return self._active
