"""A transformer whose linear layers hold fewer bits: what `model.quantize` asks of torchao, and whether it is there."""

import importlib.util
from typing import Any

from torch import nn

from protocol.config.model import ModelConfig
from protocol.errors import ModelError


def require_quantizer(config: ModelConfig) -> None:
    """Check that the package that `model.quantize` needs is installed.

    Raises:
        ModelError: it is not.
    """
    if config.quantize and importlib.util.find_spec("torchao") is None:
        raise ModelError(
            f"model.quantize={config.quantize} needs the package torchao: pip install 'flowcredit[quantize]'"
        )


def quantization_of(config: ModelConfig) -> Any:
    """Return the config by which diffusers quantises the transformer as it reads it; or None.

    Raises:
        ModelError: the package that `model.quantize` needs is not installed.
    """
    require_quantizer(config)
    if config.quantize is None:
        return None
    from diffusers import TorchAoConfig

    return TorchAoConfig(_recipe(config.quantize))


def quantized(transformer: nn.Module, config: ModelConfig) -> nn.Module:
    """Quantise a transformer that was not read from a folder, as diffusers would; returns it.

    Raises:
        ModelError: the package that `model.quantize` needs is not installed.
    """
    require_quantizer(config)
    if config.quantize:
        from torchao.quantization import quantize_

        quantize_(transformer, _recipe(config.quantize))
    return transformer


def _recipe(setting: str) -> Any:
    """Return what tells torchao how to keep the weight of a linear layer."""
    if setting == "nf4":
        from flow.quantized.nf4 import Nf4Config

        return Nf4Config()
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()
