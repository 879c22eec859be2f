"""Running means of the adapter: one for evaluation and export, and the adapter `old` of the forward objectives."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import nn

from flow.adapter.lora import adapter_of
from protocol.config.learning import AverageConfig, OldConfig
from protocol.messages import Adapter, digest_of

Config = TypeVar("Config")


class AdapterMean(Generic[Config]):
    """A separate copy of the adapter that starts equal to it; only `move` and `load` change it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: Config) -> None:
        self._parameters = parameters
        self._config = config
        self._mean = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The mean itself, by parameter name; do not change it."""
        return self._mean

    @torch.no_grad()
    def move(self, decay: float) -> None:
        """mean <- decay mean + (1 - decay) adapter."""
        for name, parameter in self._parameters.items():
            self._mean[name].lerp_(parameter.detach(), 1 - decay)

    def export(self, *, version: int) -> Adapter:
        """Copy the mean, with its digest."""
        return adapter_of(self._mean, version=version)

    def load(self, mean: Mapping[str, torch.Tensor]) -> None:
        """Continue from a copy of another mean."""
        for name, parameter in self._parameters.items():
            self._mean[name] = mean[name].to(parameter.device, copy=True)


class AdapterAverage(AdapterMean[AverageConfig]):
    """mean <- d mean + (1 - d) adapter, d = min((1 + n) / (10 + n), decay), as in Flow-GRPO's released code.

    n is the number of optimizer steps of the run so far. The mean moves if `every` divides n + 1, and then `repeats`
    times: d becomes d^repeats. Training never reads it.
    """

    def update(self, steps: int) -> None:
        """Move the mean if an update is due after this number of optimizer steps of the run."""
        if (steps + 1) % self._config.every:
            return
        self.move(min((1 + steps) / (10 + steps), self._config.decay) ** self._config.repeats)


class OldAdapter(AdapterMean[OldConfig]):
    """old <- d old + (1 - d) adapter after each iteration, d = min(rate max(0, n - flat), most).

    DiffusionNFT's released schedules (arXiv 2509.16117): rate 0.001 to 0.5, or 0 for 75 optimizer steps and then rate
    0.0075 to 0.999. AWM's (arXiv 2509.25050): rate 0.001 to 0.3.
    """

    def update(self, steps: int) -> None:
        """Move after an iteration; `steps` is n, the number of the run's optimizer steps so far."""
        self.move(min(self._config.rate * max(0, steps - self._config.flat), self._config.most))


def neutral(adapter: Adapter) -> Adapter:
    """Return an adapter of the same shapes that changes nothing: it stands for the model without adapter."""
    arrays = {name: np.zeros_like(array) for name, array in adapter.arrays.items()}
    return Adapter(version=adapter.version, arrays=arrays, digest=digest_of(arrays))
