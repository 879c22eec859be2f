"""The running mean of the adapter (EMA), for evaluation and export. Training never reads it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from protocol.config.learning import AverageConfig
from protocol.messages import Adapter, digest_of


class AdapterAverage:
    """mean <- d mean + (1 - d) adapter, d = min((1 + n) / (10 + n), decay), as in Flow-GRPO's released code.

    n is the number of optimizer steps of the run so far. The mean moves where `every` divides n + 1, there `repeats`
    times: d becomes d^repeats. It is a separate copy, which only `update` and `load` change.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AverageConfig) -> None:
        self._parameters = parameters
        self._config = config
        self._mean = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Move the mean if its turn has come after so many optimizer steps of the run."""
        if (steps + 1) % self._config.every:
            return
        decay = min((1 + steps) / (10 + steps), self._config.decay) ** self._config.repeats
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
