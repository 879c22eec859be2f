"""Find a model without loading it. This module does not import torch, so the process that starts a run stays light."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from flow.models.families import FAMILIES, Family
from flow.models.hub import config_folder, index_file, known_configs, model_folder
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from protocol.hub import is_hub_id, stay_offline_if_unreachable
from protocol.resources import SCHEME, resolve


@dataclass(frozen=True)
class ModelIndex:
    """The content of a model's `model_index.json`."""

    family: Family
    parts: tuple[str, ...]
    """Names of the model's parts, such as `transformer` and `vae`."""


def read_index(model: ModelConfig) -> ModelIndex:
    """Read the index of a folder or a hub id; of a hub id only this one file is downloaded.

    Raises:
        ModelError: the model does not exist, its `model_index.json` is not readable, its family is not supported, or
            the folder lacks a part that the index names.
    """
    is_on_hub = _is_on_hub(model)
    file = index_file(model.path, model.revision) if is_on_hub else _folder(model) / "model_index.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        pipeline = str(entries["_class_name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"model folder {model.path} must hold a readable model_index.json with a _class_name:"
            " is it in diffusers' format?"
        ) from None
    if pipeline not in FAMILIES:
        raise ModelError(f"model folder {model.path} must hold one of {sorted(FAMILIES)}, got {pipeline}")
    parts = tuple(name for name, entry in entries.items() if isinstance(entry, list) and all(entry))
    if not is_on_hub:
        _require_parts(model, file.parent, parts)
    return ModelIndex(family=FAMILIES[pipeline], parts=parts)


def find_model(model: ModelConfig) -> tuple[ModelIndex, Path]:
    """Return the index and the folder of the whole model; a hub id is downloaded.

    Raises:
        ModelError: see `read_index`; or the downloaded folder lacks a part that the index names.
    """
    index = read_index(model)
    folder = model_folder(model.path, model.revision, index.parts) if _is_on_hub(model) else _folder(model)
    _require_parts(model, folder, index.parts)
    return index, folder


def find_configs(model: ModelConfig) -> tuple[ModelIndex, Path]:
    """Return the index and a folder with its config files and tokenizers; of a hub id nothing else is downloaded.

    Raises:
        ModelError: see `read_index`.
    """
    index = read_index(model)
    return index, config_folder(model.path, model.revision) if _is_on_hub(model) else _folder(model)


def adapter_config(model: ModelConfig) -> LoraConfig:
    """Return `model.lora` with the family's defaults filled in."""
    return read_index(model).family.adapter(model.lora)


def completed(config: RunConfig) -> RunConfig:
    """Fill in what the model decides; a run folder keeps the result.

    - The adapter's config gets the family's defaults.
    - The revision of a hub id becomes a commit. So every actor loads the same files, and a resumed run notices that the
      model has changed on the hub.
    - The embedding cache becomes an absolute path, since actors may run in another working folder.

    If the hub does not answer, this process reads only its cache from here on.

    Raises:
        ModelError: see `read_index`.
    """
    model = config.model
    if _is_on_hub(model):
        stay_offline_if_unreachable()
    cache = str(resolve(model.embedding_cache).absolute()) if model.embedding_cache else None
    found = {"lora": adapter_config(model), "revision": _pinned(model), "embedding_cache": cache}
    model = model.model_copy(update=found)
    return config.model_copy(update={"model": model})


def completed_for_estimate(config: RunConfig) -> tuple[RunConfig, ModelError | None]:
    """Complete a config like `completed`; if its model is missing, from the config files that we ship for the hub id.

    Returns:
        The config, and why its model is missing; None if it is there.

    Raises:
        ModelError: the model is missing, and we ship nothing for it.
    """
    try:
        return completed(config), None
    except ModelError as error:
        known = known_configs(config.model.path)
        if known is None:
            raise
        model = config.model.model_copy(update={"path": str(known)})
        return completed(config.model_copy(update={"model": model})), error


def _pinned(model: ModelConfig) -> str | None:
    """Return the commit of a hub id, which is a folder name in the hub cache; of a folder the revision as it is."""
    if not _is_on_hub(model):
        return model.revision
    commit = index_file(model.path, model.revision).parent.name
    return commit if re.fullmatch("[0-9a-f]{40}", commit) else model.revision


def _is_on_hub(model: ModelConfig) -> bool:
    if model.path.startswith(SCHEME) or not is_hub_id(model.path):
        return False
    return not resolve(model.path).is_dir()


def _folder(model: ModelConfig) -> Path:
    folder = resolve(model.path)
    if not folder.is_dir():
        raise ModelError(
            f"model folder {model.path} does not exist: set model.path to a folder in diffusers' format or to a hub id"
        )
    return folder


def _require_parts(model: ModelConfig, folder: Path, parts: tuple[str, ...]) -> None:
    lacking = [name for name in parts if not (folder / name).is_dir()]
    if lacking:
        raise ModelError(
            f"model folder {model.path} must hold the parts that its model_index.json names, got none for {lacking}"
        )
