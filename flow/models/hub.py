"""Models on the Hugging Face hub: download a repository, or parts of it, into the hub's own cache.

HF_TOKEN opens gated models, HF_HOME or HF_HUB_CACHE names the cache, and HF_HUB_OFFLINE=1 reads the cache only.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from protocol.errors import ModelError, one_line

UNUSED_FILES = ["*.bin", "*.ckpt", "*.msgpack", "*.onnx", "*.onnx_data", "*.h5", "*.fp16.*", "*.fp16-*"]
"""Files that hold the same weights in other formats, or other precisions of them."""


KNOWN = Path(__file__).parent / "known"
"""Config files of the presets' models by hub id, enough for estimates without a network; no tokenizers, no weights."""
ANSWER_S = 3.0
"""Seconds within which the hub must answer a dry run."""


def known_configs(repo: str) -> Path | None:
    """Return the folder of config files that we ship for a hub id; None if there is none."""
    folder = KNOWN / repo
    return folder if is_hub_id(repo) and folder.is_dir() else None


def stay_offline_if_unreachable() -> None:
    """Read only the hub's cache in this process if the hub does not answer within `ANSWER_S`."""
    from huggingface_hub import constants, get_session

    heard = Event()

    def ask() -> None:
        with suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
            heard.set()

    asking = Thread(target=ask, daemon=True)  # a name server that does not answer has no timeout of its own
    asking.start()
    asking.join(ANSWER_S)
    constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or not heard.is_set()


def is_hub_id(path: str) -> bool:
    """Tell whether a path has the form `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None


def index_file(repo: str, revision: str | None) -> Path:
    """Return the path of the repository's `model_index.json`, downloaded or from the cache.

    Raises:
        ModelError: the repository is gated, unknown or without such a file, or it is neither cached nor reachable.
    """
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision):
        return Path(hf_hub_download(repo, "model_index.json", revision=revision))


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

    wanted = ["model_index.json", *(f"{part}/*" for part in parts)]
    with _explained(repo, revision):
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=list(UNUSED_FILES))
        )


def config_folder(repo: str, revision: str | None) -> Path:
    """Return a folder with the repository's config files and tokenizers but no weights: enough to compute sizes.

    Raises:
        ModelError: the repository is gated or unknown, or it is neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision):
        wanted = ["model_index.json", "*/config.json", "*/scheduler_config.json", "tokenizer*/*"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))


def adapter_folder(path: str) -> str:
    """Return the local path of a LoRA: `path` itself, or of a hub id that is no folder here the downloaded files.

    Raises:
        ModelError: the repository is gated or unknown, or it is neither cached nor reachable.
    """
    if not is_hub_id(path) or Path(path).exists():
        return path
    from huggingface_hub import snapshot_download

    with _explained(path, None, what=f"the LoRA {path}"):
        return snapshot_download(path, allow_patterns=["pytorch_lora_weights.safetensors", "adapter_*"])


@contextmanager
def _explained(repo: str, revision: str | None, *, what: str = "") -> Iterator[None]:
    """Turn the hub's errors into one line with a remedy, and hide the notices of its retries.

    Args:
        repo: the hub id.
        revision: branch, tag or commit.
        what: names it in the line; the model of this id without it.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    what = what or f"model {repo}" + (f" at revision {revision}" if revision else "")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{what} is gated: accept its terms at https://huggingface.co/{repo} and set HF_TOKEN to a token of that"
            " account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{what} is neither a folder here nor on the hub: check model.path, and HF_TOKEN if it is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{what} is not on the hub: set model.revision to a branch, tag or commit of it") from None
    except errors.LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelError(
            f"{what} is not complete in the hub cache {constants.HF_HUB_CACHE} and {reason}:"
            f" run `hf download {repo}` where there is a network, or set model.path to a folder in diffusers' format"
        ) from None
    except errors.EntryNotFoundError:
        raise ModelError(f"{what} must be in diffusers' format: it has no model_index.json") from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelError(f"{what} cannot be fetched: {one_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
