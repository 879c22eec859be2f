"""`pytorch_lora_weights.safetensors`: the adapter on disk, with its alpha, in the format of diffusers' pipelines.

pipeline.load_lora_weights("runs/demo/checkpoints/iteration_000040")
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from protocol.config.model import LoraConfig
from protocol.errors import CheckpointError, ContractError, ModelError, one_line
from protocol.ground.files import ADAPTER_FILE, share, write_whole
from protocol.ground.resources import resolve
from protocol.messages import Adapter, digest_of

PEFT_NAME, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
"""Files of `PeftModel.save_pretrained`, and the prefix of its tensors' names."""
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""PEFT's `init_lora_weights` that leave the base model as it is. PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA take a part out
of its weights, or round them; what they save is right with that other base only."""
CONVERT = "if diffusers reads it, convert it as docs/models.md shows"
METADATA_KEY = "lora_adapter_metadata"
PREFIX = "transformer."
"""Prefix of every tensor's name: the part of the pipeline that the adapter belongs to."""


def write_lora(folder: Path, adapter: Adapter, config: LoraConfig) -> Path:
    """Write the adapter in float32 with rank, alpha and targets in the header.

    The header has only this one entry: safetensors writes several entries in no fixed order, and equal adapters must
    give equal files.

    Raises:
        ContractError: the config has no rank or no alpha.
    """
    rank, alpha = _scale_of(config)
    path = folder / ADAPTER_FILE
    arrays = {name: np.ascontiguousarray(array) for name, array in adapter.arrays.items()}
    save_file(arrays, path, metadata=_header(arrays, config, rank=rank, alpha=alpha))
    share(path)
    return path


def write_scaled_lora(path: Path, adapter: Adapter, config: LoraConfig, *, dtype: str = "float32") -> None:
    """Write an adapter for programs that do not read alpha: `lora_B` has the factor alpha / rank, alpha is the rank.

    Programs that find no alpha take the rank, so all apply the adapter at the strength at which it was trained.

    Args:
        path: the file, which appears whole or not at all.
        dtype: torch's name of the dtype of the written tensors.

    Raises:
        ContractError: the config has no rank or no alpha.
        OSError: the file cannot be written.
    """
    import torch
    from safetensors.torch import save

    rank, alpha = _scale_of(config)
    scale = np.float32(alpha / rank)
    tensors = {
        name: torch.from_numpy(array * scale if ".lora_B." in name else array).to(getattr(torch, dtype))
        for name, array in adapter.arrays.items()
    }
    write_whole(path, save(tensors, metadata=_header(tensors, config, rank=rank, alpha=rank)))


def _scale_of(config: LoraConfig) -> tuple[int, float]:
    if config.rank is None or config.alpha is None:
        raise ContractError(f"a LoRA file must state rank and alpha, got {config.rank} and {config.alpha}")
    return config.rank, config.alpha


def _header(names: Iterable[str], config: LoraConfig, *, rank: int, alpha: float) -> dict[str, str]:
    modules = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names})
    metadata = {
        "transformer.r": rank,
        "transformer.lora_alpha": alpha,
        "transformer.target_modules": list(config.targets or modules),
    }
    return {METADATA_KEY: json.dumps(metadata, sort_keys=True)}


def read_lora(folder: Path, *, version: int) -> Adapter:
    """Read an adapter that `write_lora` wrote, and give it this version.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = folder / ADAPTER_FILE
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter {path} cannot be read: {error}") from error
    return Adapter(version=version, arrays=arrays, digest=digest_of(arrays))


def read_foreign_lora(path: str, *, is_outline: bool = False) -> tuple[dict[str, np.ndarray], float | None]:
    """Read any transformer's LoRA in diffusers' format, or in PEFT's own (`adapter_model.safetensors` with its config).

    Args:
        path: a file, or a folder that holds one.
        is_outline: read the header only; the tensors are zeros without memory.

    Returns:
        The tensors in float32 by name, such as `transformer.….lora_A.weight`, and the LoRA's alpha. alpha is None if
        the file does not state it; diffusers then takes the rank.

    Raises:
        ModelError: the file does not exist, is not in diffusers' format, holds several alphas, its scale is not
            alpha / rank, or it belongs to a changed base model.
    """
    import torch

    file = resolve(path)
    if file.is_dir():
        found = sorted(each.name for each in file.glob("*.safetensors"))
        file = file / next((name for name in (ADAPTER_FILE, PEFT_NAME) if name in found), ADAPTER_FILE)
        if found and file.name not in found:
            raise ModelError(
                f"model.lora.start {path} must hold {ADAPTER_FILE} or {PEFT_NAME}, got {', '.join(found[:5])}: name one"
                f" of them, such as {path.rstrip('/')}/{found[0]}"
            )
    try:
        with safe_open(file, framework="pt") as held:
            header = json.loads((held.metadata() or {}).get(METADATA_KEY, "{}"))
            tensors = {
                name: torch.zeros(()).expand(held.get_slice(name).get_shape())
                if is_outline and not name.endswith(".alpha")
                else held.get_tensor(name)
                for name in held.keys()  # noqa: SIM118
            }
        settings = {name.removeprefix(PREFIX): value for name, value in header.items() if name.startswith(PREFIX)}
        if any(name.startswith(PEFT_PREFIX) for name in tensors):
            settings = json.loads((file.parent / PEFT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"model.lora.start {path} cannot be read: {one_line(error)}") from None
    per_module = [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]
    lacking = sorted({name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name} - set(per_module))
    if per_module and lacking:
        raise ModelError(
            f"model.lora.start {path} must state alpha for all modules or for none, got none for {lacking[0]}: add the"
            f" tensor {lacking[0]}.alpha"
        )
    alphas = {float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}
    stated = [settings.get("lora_alpha"), *(settings.get("alpha_pattern") or {}).values()]
    alphas |= {float(alpha) for alpha in stated if alpha}
    if settings.get("init_lora_weights") not in PLAIN_STARTS:
        raise ModelError(
            f"model.lora.start {path} must be right with the model as it is, got init_lora_weights"
            f" {settings['init_lora_weights']!r}, which changes the base model too: save it with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
    if settings.get("use_rslora"):
        raise ModelError(
            f"model.lora.start {path} must have the scale alpha / rank, got use_rslora, whose scale is alpha /"
            " sqrt(rank): save it without use_rslora, with its alpha multiplied by sqrt(rank)"
        )
    arrays = {
        re.sub(rf"^{re.escape(PEFT_PREFIX)}(?:{re.escape(PREFIX)})?", PREFIX, name): tensor.float().numpy()
        for name, tensor in tensors.items()
        if not name.endswith(".alpha")
    }
    odd = [name for name in arrays if not re.fullmatch(rf"{PREFIX}.+\.lora_[AB]\.weight", name)]
    if odd or not arrays:
        reason = f"tensor {odd[0]}" if odd else "no tensor"
        raise ModelError(
            f"model.lora.start {path} must be a transformer's LoRA in diffusers' format, got {reason}: {CONVERT}"
        )
    if len(alphas) > 1:
        one = max(alphas)
        raise ModelError(
            f"model.lora.start {path} must have one alpha, got {sorted(alphas)}: state {one:g} for all modules, and"
            f" multiply each lora_B by its alpha / {one:g}; {CONVERT}"
        )
    return arrays, alphas.pop() if alphas else None
