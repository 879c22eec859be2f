"""Models on the Hugging Face hub: download what of a repository is needed into the hub's own cache.

Every function here raises ModelError if a repository is gated, unknown, or neither cached nor reachable.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from protocol.errors import ModelError
from protocol.ground.hub import hub_errors, is_hub_id
from protocol.ground.resources import SCHEME, resolve

INDEX = "model_index.json"
"""Names a pipeline's class and parts, in diffusers' format."""
CONFIGS = [INDEX, "*/config.json", "*/scheduler_config.json", "tokenizer*/*", "processor/*"]
"""Config files and tokenizers: enough to compute sizes."""
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


def index_folder(repo: str, revision: str | None) -> Path:
    """Return the folder of a repository, with its `model_index.json` at least."""
    from huggingface_hub import hf_hub_download

    with _model_errors(repo, revision):
        return Path(hf_hub_download(repo, INDEX, revision=revision)).parent


def model_folder(repo: str, revision: str | None, parts: Sequence[str]) -> Path:
    """Return the folder of a repository with its config files, tokenizers, and the weights of these parts.

    Of weights in several formats one is downloaded, `*.fp16.safetensors` if a part has nothing else.
    """
    from huggingface_hub import snapshot_download

    wanted = [*CONFIGS, *(f"{part}/*" for part in parts)]
    with _model_errors(repo, revision):
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=list(UNUSED_FILES))
        )
        models = (part for part in parts if (folder / part / "config.json").exists())
        only_halved = [f"{part}/*.fp16*" for part in models if not any((folder / part).glob("*.safetensors"))]
        if only_halved:  # a repository whose only safetensors files are of this variant
            snapshot_download(repo, revision=revision, allow_patterns=only_halved, ignore_patterns=["*.bin"])
        return folder


def config_folder(repo: str, revision: str | None) -> Path:
    """Return the folder of a repository with its config files and tokenizers."""
    from huggingface_hub import snapshot_download

    with _model_errors(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=CONFIGS))


def tiny_decoder_folder(repo: str, revision: str | None, *, is_whole: bool) -> Path:
    """Return the folder of an `AutoencoderTiny` with its config, and with its weights if `is_whole`."""
    from huggingface_hub import snapshot_download

    wanted = ["config.json", *(["diffusion_pytorch_model.safetensors"] if is_whole else [])]
    key = "model.tiny_decoder"
    with _errors_of(f"the tiny decoder {repo}", repo, revision, key, f"set {key} to a folder", f"{key}_revision"):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))


def lora_path(path: str, revision: str | None, *, is_whole: bool = True) -> str:
    """Return where a LoRA is: `path` itself, or the folder of a hub id, which has weights only if `is_whole`."""
    if not is_on_hub(path):
        return path
    from huggingface_hub import snapshot_download

    wanted = ["adapter_config.json", *(["pytorch_lora_weights.safetensors", "adapter_*"] if is_whole else [])]
    key = "model.lora.start"
    with _errors_of(f"the LoRA {path}", path, revision, key, f"set {key} to a folder or file", "model.lora.revision"):
        return snapshot_download(path, revision=revision, allow_patterns=wanted)


def _model_errors(repo: str, revision: str | None) -> AbstractContextManager[None]:
    remedy = "set model.path to a folder in diffusers' format"
    return _errors_of(f"model {repo}", repo, revision, "model.path", remedy, "model.revision")


def _errors_of(
    what: str, repo: str, revision: str | None, key: str, remedy: str, revision_key: str
) -> AbstractContextManager[None]:
    what += f" at revision {revision}" if revision else ""
    return hub_errors(what, repo, error=ModelError, key=key, remedy=remedy, revision_key=revision_key)
