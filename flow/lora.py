"""The trained adapter: attaching it to a transformer, and adapter tensors <-> `PolicyWeights`."""

from collections.abc import Mapping

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from torch import nn

from protocol.config_policy import LoraConfig
from protocol.errors import ContractError, ModelError
from protocol.messages import PolicyWeights, digest_of

ADAPTER = "default"
PREFIX = "transformer."
"""diffusers' name of the part of the pipeline that the adapter belongs to."""


class Lora:
    """The LoRA tensors of one transformer by their diffusers names.

    Made once for each policy; B starts at zero, so a fresh adapter changes nothing.

        lora = Lora(transformer, config.model.lora, seed=config.seed)
        weights = lora.export(version=0)      # in the learner
        lora.load(weights)                    # in a rollout actor
    """

    def __init__(self, transformer: nn.Module, config: LoraConfig, *, seed: int) -> None:
        peft_config = PeftLoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            init_lora_weights="gaussian",
            target_modules=list(config.targets),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(peft_config, transformer, adapter_name=ADAPTER)
            except ValueError as error:
                raise ModelError(
                    f"model.lora.targets must name modules of the transformer, got {list(config.targets)}:"
                    " no module takes the adapter"
                ) from error
        self.parameters: dict[str, nn.Parameter] = {
            PREFIX + name.replace(f".{ADAPTER}.", "."): parameter
            for name, parameter in transformer.named_parameters()
            if "lora_" in name
        }
        idle = [target for target in config.targets if not any(f".{target}.lora_" in name for name in self.parameters)]
        if idle:
            raise ModelError(f"each of model.lora.targets must name modules of the transformer, got none for {idle}")

    def export(self, *, version: int) -> PolicyWeights:
        """A copy of the adapter with its digest."""
        arrays = {name: parameter.detach().cpu().numpy().copy() for name, parameter in self.parameters.items()}
        return PolicyWeights(version=version, arrays=arrays, digest=digest_of(arrays))

    def load(self, weights: PolicyWeights) -> str:
        """Take over an adapter and return the digest of what the transformer then holds.

        Raises:
            ContractError: names or shapes are not those of this adapter, or the digest differs after loading.
        """
        self._check(weights.arrays)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(np.array(weights.arrays[name])))
        held = self.export(version=weights.version).digest
        if held != weights.digest:
            raise ContractError(f"adapter version {weights.version} must have digest {weights.digest}, got {held}")
        return held

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays.keys() != self.parameters.keys():
            odd = sorted(arrays.keys() ^ self.parameters.keys())
            raise ContractError(f"an adapter must name the tensors of this model, got a difference in {odd[:3]}")
        for name, parameter in self.parameters.items():
            if arrays[name].shape != tuple(parameter.shape):
                raise ContractError(
                    f"adapter tensor {name} must be {list(parameter.shape)}, got {list(arrays[name].shape)}"
                )
