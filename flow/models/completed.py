"""A run's config as its model completes it. This module does not import torch."""

from pathlib import Path

from flow.models.hub import is_on_hub, known_configs, lora_path
from flow.models.located import COMMIT, commit_of, locate
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from protocol.ground.hub import stay_offline_if_unreachable
from protocol.ground.resources import resolve


def completed(config: RunConfig) -> RunConfig:
    """Fill in what the model decides; a run folder keeps the result.

    - The adapter's config gets the family's defaults.
    - The revision of a hub id becomes a commit, for the model, for its tiny decoder and for the LoRA to start from. So
      every actor loads the same files, and a resumed run notices that they have changed on the hub.
    - The embedding cache becomes an absolute path, since actors may run in another working folder.

    If the hub does not answer, this process reads only its cache from here on.

    Raises:
        ModelError: see `flow.models.located`; or the LoRA to start from is not on the hub.
    """
    model = config.model
    if any(path and is_on_hub(path) for path in (model.path, model.tiny_decoder, model.lora.start)):
        stay_offline_if_unreachable()
    located = locate(model)
    tiny, tiny_commit = located.tiny_decoder(is_whole=False), model.tiny_decoder_revision
    if tiny and model.tiny_decoder and is_on_hub(model.tiny_decoder):
        tiny_commit = commit_of(tiny, tiny_commit)
    changes = {
        "lora": located.lora.model_copy(update={"revision": _pinned_lora(model.lora)}),
        "revision": located.commit,
        "tiny_decoder_revision": tiny_commit,
        "embedding_cache": str(resolve(model.embedding_cache).absolute()) if model.embedding_cache else None,
    }
    return config.model_copy(update={"model": model.model_copy(update=changes)})


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


def require_revisions(model: ModelConfig) -> None:
    """Raise ModelError if a revision of the config would be ignored, since a folder or a file has none."""
    revisions = (
        ("model.revision", model.revision, "model.path", model.path),
        ("model.tiny_decoder_revision", model.tiny_decoder_revision, "model.tiny_decoder", model.tiny_decoder),
        ("model.lora.revision", model.lora.revision, "model.lora.start", model.lora.start),
    )
    for key, revision, path_key, path in revisions:
        if revision is not None and not (path and is_on_hub(path)):
            raise ModelError(
                f"{key} belongs to a hub id in {path_key}, got {revision!r} with {path or 'null'} there:"
                f" set {key}=null, or name a hub id"
            )


def _pinned_lora(lora: LoraConfig) -> str | None:
    """Return the commit of the LoRA to start from; for a file or folder, the revision as it is."""
    if lora.start is None or not is_on_hub(lora.start):
        return lora.revision
    if lora.revision and COMMIT.fullmatch(lora.revision):
        return lora.revision  # a process that needs no LoRA itself also resumes where the hub cannot be reached
    return commit_of(Path(lora_path(lora.start, lora.revision, is_whole=False)), lora.revision)
