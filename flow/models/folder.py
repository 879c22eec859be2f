"""Finding a model without loading it: light enough for the process that only starts a run."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from flow.models.families import FAMILIES, Family
from flow.models.hub import config_folder, index_file, is_hub_id, model_folder
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from protocol.resources import SCHEME, resolve


@dataclass(frozen=True)
class ModelIndex:
    """What a model's `model_index.json` says."""

    family: Family
    parts: tuple[str, ...]
    """The parts that it holds, such as `transformer` and `vae`."""


def read_index(model: ModelConfig) -> ModelIndex:
    """The index of a folder or a hub id; of a hub id only this one file is fetched.

    Raises:
        ModelError: no such model, no readable `model_index.json`, a family that we do not train, or a folder that lacks
            a part that its index names.
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
    """The index and the folder that holds the whole model, downloaded when it is a hub id.

    Raises:
        ModelError: as `read_index`, or the folder lacks a part that the index names.
    """
    index = read_index(model)
    folder = model_folder(model.path, model.revision, index.parts) if _is_on_hub(model) else _folder(model)
    _require_parts(model, folder, index.parts)
    return index, folder


def find_configs(model: ModelConfig) -> tuple[ModelIndex, Path]:
    """The index and a folder with the model's config files; of a hub id nothing else is downloaded.

    Raises:
        ModelError: as `read_index`.
    """
    index = read_index(model)
    return index, config_folder(model.path, model.revision) if _is_on_hub(model) else _folder(model)


def adapter_config(model: ModelConfig) -> LoraConfig:
    """`model.lora` with the family's defaults filled in."""
    return read_index(model).family.adapter(model.lora)


def completed(config: RunConfig) -> RunConfig:
    """The config with everything in it that its model decides: what a run folder keeps.

    That is the family's adapter, and the commit of a hub id, so that every actor loads the same files and a model that
    has changed on the hub is found out when the run goes on. The embedding cache becomes an absolute path, since actors
    may have another working folder.

    Raises:
        ModelError: as `read_index`.
    """
    model = config.model
    cache = str(resolve(model.embedding_cache).absolute()) if model.embedding_cache else None
    found = {"lora": adapter_config(model), "revision": _pinned(model), "embedding_cache": cache}
    model = model.model_copy(update=found)
    return config.model_copy(update={"model": model})


def _pinned(model: ModelConfig) -> str | None:
    """The commit of a hub id, read from the hub cache's own folder name; the revision as it is for a folder."""
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
            f"model folder {model.path} must hold the parts that its model_index.json names, lacks {lacking}"
        )
