"""The running mean of the adapter (EMA): smoother adapter for evaluation and export; training never sees them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from protocol.config.learning import AverageConfig
from protocol.messages import Adapter, digest_of


class AdapterAverage:
    """mean <- d mean + (1 - d) adapter every few optimizer steps, d = min((1 + n) / (10 + n), decay) as in Flow-GRPO.

    n counts optimizer steps. The mean is a copy of its own, so that no update of the adapter reaches it by itself.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AverageConfig) -> None:
        self._parameters = parameters
        self._config = config
        self._mean = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimizer step number `step`, counted from 0."""
        if (step + 1) % self._config.every:
            return
        decay = min((1 + step) / (10 + step), self._config.decay)
        for name, parameter in self._parameters.items():
            self._mean[name].lerp_(parameter.detach(), 1 - decay)

    def export(self, *, version: int) -> Adapter:
        """A copy of the mean with its digest."""
        arrays = {name: mean.cpu().numpy().copy() for name, mean in self._mean.items()}
        return Adapter(version=version, arrays=arrays, digest=digest_of(arrays))

    def load(self, adapter: Adapter) -> None:
        """Go on from a saved mean."""
        for name, array in adapter.arrays.items():
            self._mean[name] = torch.from_numpy(np.array(array)).to(self._parameters[name].device)
