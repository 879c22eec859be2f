"""`pytorch_lora_weights.safetensors`: the adapter on disk as a diffusers pipeline loads it, alpha preserved.

pipeline.load_lora_weights("runs/demo/checkpoints/step_000040")
"""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from protocol.config_policy import LoraConfig
from protocol.errors import CheckpointError
from protocol.messages import PolicyWeights, digest_of

FILE_NAME = "pytorch_lora_weights.safetensors"
"""diffusers' own default name."""
METADATA_KEY = "lora_adapter_metadata"


def write_lora(folder: Path, weights: PolicyWeights, config: LoraConfig) -> Path:
    """Write the adapter in float32 with rank, alpha and targets in the header.

    The header has this one entry only: safetensors writes several in no fixed order, and equal weights must give
    equal files.
    """
    adapter = {
        "transformer.r": config.rank,
        "transformer.lora_alpha": config.alpha,
        "transformer.target_modules": list(config.targets),
    }
    path = folder / FILE_NAME
    arrays = {name: np.ascontiguousarray(array) for name, array in weights.arrays.items()}
    save_file(arrays, path, metadata={METADATA_KEY: json.dumps(adapter, sort_keys=True)})
    return path


def read_lora(folder: Path, *, version: int) -> PolicyWeights:
    """Read an adapter that `write_lora` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = folder / FILE_NAME
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter {path} cannot be read: {error}") from error
    return PolicyWeights(version=version, arrays=arrays, digest=digest_of(arrays))
