"""Models on the Hugging Face hub: download a repository, or parts of it, into the hub's own cache."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from protocol.errors import ModelError
from protocol.hub import explained, is_hub_id
from protocol.resources import SCHEME, resolve

INDEX = "model_index.json"
"""Names a pipeline's class and parts, in diffusers' format."""
UNUSED_FILES = ["*.bin", "*.ckpt", "*.msgpack", "*.onnx", "*.onnx_data", "*.h5", "*.fp16.*", "*.fp16-*"]
"""Files that hold the same weights in other formats or precisions."""
KNOWN = Path(__file__).parent / "known"
"""Config files of the presets' models by hub id, enough for estimates without a network; its README.md says more."""


def known_configs(repo: str) -> Path | None:
    """Return the folder of config files that we ship for a hub id; None if there is none."""
    folder = KNOWN / repo
    return folder if is_hub_id(repo) and folder.is_dir() else None


def is_known(folder: Path) -> bool:
    """Tell whether a folder belongs to the config files that we ship, which have neither weights nor tokenizers."""
    return KNOWN in folder.parents


def is_on_hub(path: str) -> bool:
    """Tell whether a path of the config is a hub id; a folder or file of that name on this machine comes first."""
    return not path.startswith(SCHEME) and is_hub_id(path) and not resolve(path).exists()


def index_file(repo: str, revision: str | None) -> Path:
    """Return the path of the repository's `model_index.json`, downloaded or from the cache.

    Raises:
        ModelError: the repository is gated, unknown or without such a file, or it is neither cached nor reachable.
    """
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision):
        return Path(hf_hub_download(repo, INDEX, revision=revision))


def model_folder(repo: str, revision: str | None, parts: Sequence[str]) -> Path:
    """Return a folder with these parts of the repository, downloaded or from the cache.

    Args:
        repo: the hub id `org/name`.
        revision: branch, tag or commit; None for the default branch.
        parts: sub-folders of the repository, such as `transformer`.

    Returns:
        The folder in the hub's cache.

    Raises:
        ModelError: the repository is gated or unknown, or it is neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download

    wanted = [INDEX, *(f"{part}/*" for part in parts)]
    with _explained(repo, revision):
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=list(UNUSED_FILES))
        )
        models = (part for part in parts if (folder / part / "config.json").exists())
        only_halved = [f"{part}/*.fp16*" for part in models if not any((folder / part).glob("*.safetensors"))]
        if only_halved:  # a repository whose only safetensors files are of this variant
            snapshot_download(repo, revision=revision, allow_patterns=only_halved, ignore_patterns=["*.bin"])
        return folder


def config_folder(repo: str, revision: str | None) -> Path:
    """Return a folder with the repository's config files and tokenizers but no weights: enough to compute sizes.

    Raises:
        ModelError: the repository is gated or unknown, or it is neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision):
        wanted = [INDEX, "*/config.json", "*/scheduler_config.json", "tokenizer*/*"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))


def tiny_decoder_folder(path: str, revision: str | None, *, is_whole: bool) -> Path:
    """Return the folder of an `AutoencoderTiny` on the hub, downloaded or from the cache.

    Args:
        path: a hub id `org/name`.
        revision: branch, tag or commit; None for the default branch.
        is_whole: with its weights; otherwise only its config.

    Returns:
        The folder in the hub's cache.

    Raises:
        ModelError: the repository is gated or unknown, or it is neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download

    wanted = ["config.json", *(["diffusion_pytorch_model.safetensors"] if is_whole else [])]
    key = "model.tiny_decoder"
    with explained(
        f"the tiny decoder {path}{_at(revision)}",
        path,
        error=ModelError,
        key=key,
        revision_key="model.tiny_decoder_revision",
        remedy=f"set {key} to a folder",
    ):
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted))


def adapter_folder(path: str, revision: str | None, *, is_whole: bool = True) -> str:
    """Return the local path of a LoRA: `path` itself, or the downloaded files of a hub id that is not a folder here.

    Args:
        path: a folder, a file or a hub id.
        revision: branch, tag or commit of a hub id; None for the default branch.
        is_whole: with its weights; otherwise only a config, if it has one.

    Returns:
        The path; for a hub id, the folder in the hub's cache.

    Raises:
        ModelError: the repository is gated or unknown, or it is neither cached nor reachable.
    """
    if not is_on_hub(path):
        return path
    from huggingface_hub import snapshot_download

    wanted = ["adapter_config.json", *(["pytorch_lora_weights.safetensors", "adapter_*"] if is_whole else [])]
    key = "model.lora.start"
    with explained(
        f"the LoRA {path}{_at(revision)}",
        path,
        error=ModelError,
        key=key,
        revision_key="model.lora.revision",
        remedy=f"set {key} to a folder or file",
    ):
        return snapshot_download(path, revision=revision, allow_patterns=wanted)


def _explained(repo: str, revision: str | None) -> AbstractContextManager[None]:
    remedy = "set model.path to a folder in diffusers' format"
    return explained(f"model {repo}{_at(revision)}", repo, error=ModelError, key="model.path", remedy=remedy)


def _at(revision: str | None) -> str:
    return f" at revision {revision}" if revision else ""
