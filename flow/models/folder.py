"""Find a model without loading it. This module does not import torch, so the process that starts a run stays light."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow.models.families import FAMILIES, Family
from flow.models.hub import (
    INDEX,
    adapter_folder,
    config_folder,
    index_file,
    is_on_hub,
    known_configs,
    model_folder,
    tiny_decoder_folder,
)
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError, one_line
from protocol.hub import stay_offline_if_unreachable
from protocol.resources import resolve

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""Class of the schedulers whose sigmas `flow.maths.schedule` computes."""
CORE_PARTS = "transformer", "vae", "scheduler"
"""Parts of every pipeline."""


@dataclass(frozen=True)
class ModelIndex:
    """The content of a model's `model_index.json`."""

    family: Family
    parts: tuple[str, ...]
    """Names of the model's parts, such as `transformer` and `vae`."""


def read_index(model: ModelConfig) -> ModelIndex:
    """Read the index of a folder or a hub id; for a hub id, only this one file is downloaded.

    Raises:
        ModelError: the model does not exist, its `model_index.json` is not readable, its family is not supported, or
            the folder lacks a part that the index names.
    """
    is_remote = is_on_hub(model.path)
    file = index_file(model.path, model.revision) if is_remote else _folder(model) / INDEX
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
    lacking = [part for part in CORE_PARTS if part not in parts]
    if lacking:
        raise ModelError(f"model folder {model.path} must name {', '.join(CORE_PARTS)} in {INDEX}, got no {lacking[0]}")
    require_schedule_class(entries["scheduler"][-1], model.path)
    if not is_remote:
        _require_parts(model, file.parent, parts)
    return ModelIndex(family=FAMILIES[pipeline], parts=parts)


def require_schedule_class(name: Any, path: str) -> None:
    """Check that the class of a model's scheduler is the one whose sigmas ours are.

    Raises:
        ModelError: it is another.
    """
    if name != SCHEDULER:
        raise ModelError(
            f"the scheduler of model folder {path} must be a {SCHEDULER}, got {name}: our schedule would differ from"
            " its sigmas"
        )


def require_revisions(model: ModelConfig) -> None:
    """Check that each revision of the config belongs to a hub id: a folder or a file has none.

    Args:
        model: the model's config.

    Raises:
        ModelError: one would be ignored.
    """
    for problem in ignored_revisions(model).values():
        raise ModelError(problem)


def ignored_revisions(model: ModelConfig) -> dict[str, str]:
    """Return the key of each revision that belongs to no hub id, with the line that refuses it."""
    revisions = (
        ("model.revision", model.revision, "model.path", model.path),
        ("model.tiny_decoder_revision", model.tiny_decoder_revision, "model.tiny_decoder", model.tiny_decoder),
        ("model.lora.revision", model.lora.revision, "model.lora.start", model.lora.start),
    )
    return {
        key: f"{key} belongs to a hub id in {path_key}, got {revision!r} with {path or 'null'} there: set {key}=null,"
        " or name a hub id"
        for key, revision, path_key, path in revisions
        if revision is not None and not (path and is_on_hub(path))
    }


def read_settings(file: Path) -> dict[str, Any]:
    """Read one of the JSON files of a model's folder.

    Raises:
        ModelError: it cannot be read, or is no mapping.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model file {file} cannot be read: {one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"model file {file} must hold a mapping, got {type(settings).__name__}")
    return settings


def find_model(model: ModelConfig) -> tuple[ModelIndex, Path]:
    """Return the index and the folder of the whole model; a hub id is downloaded.

    Raises:
        ModelError: see `read_index`; or the downloaded folder lacks a part that the index names.
    """
    index = read_index(model)
    folder = model_folder(model.path, model.revision, index.parts) if is_on_hub(model.path) else _folder(model)
    _require_parts(model, folder, index.parts)
    return index, folder


def find_configs(model: ModelConfig) -> tuple[ModelIndex, Path]:
    """Return the index and a folder with its config files and tokenizers; for a hub id, nothing else is downloaded.

    Raises:
        ModelError: see `read_index`.
    """
    index = read_index(model)
    return index, config_folder(model.path, model.revision) if is_on_hub(model.path) else _folder(model)


COMMIT = re.compile("[0-9a-f]{40}")
"""The name of a commit of the hub."""
IMAGE_VAES = "AutoencoderKL", "AutoencoderTiny"
"""VAEs that a tiny decoder can replace: others pack their latents or decode them as the frames of a video."""


def find_tiny_decoder(model: ModelConfig, folder: Path, *, is_whole: bool = True) -> Path | None:
    """Return the folder of `model.tiny_decoder`; None without one.

    Args:
        model: the model's config.
        folder: the model's folder, or one with its config files.
        is_whole: download its weights too, if it is on the hub.

    Returns:
        The folder.

    Raises:
        ModelError: it is missing, it is not an `AutoencoderTiny`, or it decodes other latents than the model's VAE.
    """
    if model.tiny_decoder is None:
        return None
    found = resolve(model.tiny_decoder)
    if is_on_hub(model.tiny_decoder):
        found = tiny_decoder_folder(model.tiny_decoder, model.tiny_decoder_revision, is_whole=is_whole)
    tiny, vae = _decoder_facts(found / "config.json"), _decoder_facts(folder / "vae" / "config.json")
    if tiny is None or tiny.kind != "AutoencoderTiny":
        raise ModelError(
            f"model.tiny_decoder must be an AutoencoderTiny in diffusers' format, got {model.tiny_decoder}: take"
            " madebyollin/taesd3 for SD3 and SD3.5, madebyollin/taef1 for FLUX.1, or a folder"
        )
    if vae is None or vae.kind not in IMAGE_VAES:
        raise ModelError(
            f"model.tiny_decoder needs a model whose VAE is one of {list(IMAGE_VAES)}, which decode latents"
            f" as they are, got {model.tiny_decoder} for {model.path}, whose VAE is another or is not named: leave"
            " it out"
        )
    if (tiny.channels, tiny.scale) != (vae.channels, vae.scale):
        raise ModelError(
            f"model.tiny_decoder must decode the model's latents, of {vae.channels} channels to {vae.scale} times their"
            f" size, got {model.tiny_decoder} for {tiny.channels} channels and {tiny.scale} times: take the one that"
            " was made for this model"
        )
    return found


@dataclass(frozen=True)
class _Decoder:
    kind: str
    channels: int
    scale: int


def _decoder_facts(file: Path) -> _Decoder | None:
    """Read which latents a VAE decodes, from its config file; None if it cannot be read."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        levels = settings.get("decoder_block_out_channels") or settings["block_out_channels"]
        factor = settings.get("upsampling_scaling_factor", 2)
        return _Decoder(str(settings["_class_name"]), int(settings["latent_channels"]), factor ** (len(levels) - 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def adapter_config(model: ModelConfig) -> LoraConfig:
    """Return `model.lora` with the family's defaults filled in."""
    return read_index(model).family.adapter(model.lora)


def completed(config: RunConfig) -> RunConfig:
    """Fill in what the model decides; a run folder keeps the result.

    - The adapter's config gets the family's defaults.
    - The revision of a hub id becomes a commit, for the model, for its tiny decoder and for the LoRA to start from. So
      every actor loads the same files, and a resumed run notices that they have changed on the hub.
    - The embedding cache becomes an absolute path, since actors may run in another working folder.

    If the hub does not answer, this process reads only its cache from here on.

    Raises:
        ModelError: see `read_index` and `find_tiny_decoder`; or the LoRA to start from is not on the hub.
    """
    model = config.model
    if any(path and is_on_hub(path) for path in (model.path, model.tiny_decoder, model.lora.start)):
        stay_offline_if_unreachable()
    tiny, tiny_commit = model.tiny_decoder, model.tiny_decoder_revision
    if tiny and (folder := find_tiny_decoder(model, find_configs(model)[1], is_whole=False)) and is_on_hub(tiny):
        tiny_commit = _commit_of(folder, tiny_commit)
    cache = str(resolve(model.embedding_cache).absolute()) if model.embedding_cache else None
    lora = adapter_config(model)
    lora = lora.model_copy(update={"revision": _pinned_lora(lora)})
    found = {
        "lora": lora,
        "revision": _pinned(model),
        "tiny_decoder_revision": tiny_commit,
        "embedding_cache": cache,
    }
    model = model.model_copy(update=found)
    return config.model_copy(update={"model": model})


def completed_for_estimate(config: RunConfig) -> tuple[RunConfig, ModelError | None]:
    """Complete a config like `completed`; if its model is missing, use the config files that we ship for its hub id.

    A LoRA to start from is left out then if it is on the hub: it changes no size.

    Returns:
        The config, and why its model or LoRA is missing; None if both are there.

    Raises:
        ModelError: the model is missing, and we ship nothing for it; or the LoRA is a file or folder that is missing.
    """
    try:
        return completed(config), None
    except ModelError as error:
        known: dict[str, str | None] = {}
        for key, revision in (("path", "revision"), ("tiny_decoder", "tiny_decoder_revision")):
            path = getattr(config.model, key)
            if path and (folder := known_configs(path)):
                known |= {key: str(folder), revision: None}
        lora = config.model.lora
        if lora.start and is_on_hub(lora.start):
            lora = lora.model_copy(update={"start": None, "revision": None})
        if not known and lora is config.model.lora:
            raise
        model = config.model.model_copy(update=known | {"lora": lora})
        return completed(config.model_copy(update={"model": model})), error


def _pinned(model: ModelConfig) -> str | None:
    """Return the commit of a hub id; for a folder, the revision as it is."""
    if not is_on_hub(model.path):
        return model.revision
    return _commit_of(index_file(model.path, model.revision).parent, model.revision)


def _pinned_lora(lora: LoraConfig) -> str | None:
    """Return the commit of the LoRA to start from, as `_pinned` does for the model."""
    if lora.start is None or not is_on_hub(lora.start):
        return lora.revision
    if lora.revision and COMMIT.fullmatch(lora.revision):
        return lora.revision  # a process that needs no LoRA itself also resumes where the hub cannot be reached
    return _commit_of(Path(adapter_folder(lora.start, lora.revision, is_whole=False)), lora.revision)


def _commit_of(folder: Path, revision: str | None) -> str | None:
    """Return the commit after which a folder of the hub's cache is named; the revision if it has another name."""
    return folder.name if COMMIT.fullmatch(folder.name) else revision


def _folder(model: ModelConfig) -> Path:
    folder = resolve(model.path)
    if folder.is_file():
        raise ModelError(
            f"model.path {model.path} is one file, not a folder in diffusers' format: load it with diffusers'"
            " from_single_file and save_pretrained a folder, or name a hub id"
        )
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
