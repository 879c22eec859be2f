"""The running mean of the adapter (EMA), for evaluation and export. Training never reads it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from protocol.config.learning import AverageConfig
from protocol.messages import Adapter, digest_of


class AdapterAverage:
    """mean <- d mean + (1 - d) adapter every few optimizer steps, d = min((1 + n) / (10 + n), decay) as in Flow-GRPO.

    n counts optimizer steps. The mean is a separate copy, which only `update` and `load` change.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AverageConfig) -> None:
        self._parameters = parameters
        self._config = config
        self._mean = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, optimizer_step: int) -> None:
        """Move the mean after this optimizer step of the run, counted from 0, if its turn has come."""
        if (optimizer_step + 1) % self._config.every:
            return
        decay = min((1 + optimizer_step) / (10 + optimizer_step), self._config.decay)
        for name, parameter in self._parameters.items():
            self._mean[name].lerp_(parameter.detach(), 1 - decay)

    def export(self, *, version: int) -> Adapter:
        """Copy the mean, with its digest."""
        arrays = {name: mean.cpu().numpy().copy() for name, mean in self._mean.items()}
        return Adapter(version=version, arrays=arrays, digest=digest_of(arrays))

    def load(self, adapter: Adapter) -> None:
        """Continue from a saved mean."""
        for name, array in adapter.arrays.items():
            self._mean[name] = torch.from_numpy(np.array(array)).to(self._parameters[name].device)
