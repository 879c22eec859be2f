"""The Hugging Face hub: whether it answers, whether it or its cache holds a repository, and its errors as one line.

HF_TOKEN opens gated repositories, HF_HOME or HF_HUB_CACHE names the cache, and HF_HUB_OFFLINE=1 reads the cache only.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

from protocol.errors import InputError, one_line

ANSWER_S = 10.0
"""Seconds within which the hub must answer; its library would try for a minute."""


def is_hub_id(path: str) -> bool:
    """Tell whether a path has the form `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None


def stay_offline_if_unreachable() -> None:
    """Read only the hub's cache in this process if the hub does not answer within `ANSWER_S`."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or not hub_answers(constants.ENDPOINT)


@cache
def hub_answers(endpoint: str) -> bool:
    """Tell whether the hub at an address answers within `ANSWER_S`; a process asks once."""
    from huggingface_hub import get_session

    heard = Event()

    def request() -> None:
        with suppress(Exception):  # any failure means the same: no answer
            get_session().head(endpoint, timeout=ANSWER_S)
            heard.set()

    requesting = Thread(target=request, daemon=True)  # a name server that does not answer has no timeout of its own
    requesting.start()
    requesting.join(ANSWER_S)
    return heard.is_set()


def cached_on_hub(repo: str) -> Path | None:
    """Return the folder of a repository in the hub's cache, which may hold a part of its files; None without one."""
    from huggingface_hub import errors, snapshot_download

    with suppress(errors.LocalEntryNotFoundError):
        return Path(snapshot_download(repo, local_files_only=True))
    return None


def require_on_hub(repo: str, patterns: Sequence[str], *, what: str, error: type[InputError]) -> None:
    """Check that the cache holds files of a repository, or that the hub has the repository; download nothing.

    Args:
        repo: the hub id `org/name`.
        patterns: one of them must match a file, such as `*.safetensors`.

    Raises:
        InputError: of the type `error`: neither the cache nor the hub has it.
    """
    from huggingface_hub import HfApi, constants, errors

    folder = cached_on_hub(repo)
    if folder and any(any(folder.glob(pattern)) for pattern in patterns):
        return
    stay_offline_if_unreachable()
    with hub_errors(what, repo, error=error, remedy="name a folder that holds it"):
        if constants.HF_HUB_OFFLINE:
            raise errors.LocalEntryNotFoundError(repo)
        HfApi().model_info(repo, timeout=ANSWER_S)


@contextmanager
def hub_errors(
    what: str,
    repo: str,
    *,
    error: type[InputError],
    remedy: str,
    key: str = "the name",
    revision_key: str = "model.revision",
) -> Iterator[None]:
    """Turn the hub's errors into one line with a remedy, and hide the notices of its retries.

    Args:
        remedy: what to do without a network, other than to download elsewhere.
        key: the config key that holds the hub id.
        revision_key: the config key that holds its branch, tag or commit.

    Raises:
        InputError: of the type `error`.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except errors.GatedRepoError:
        raise error(
            f"{what} is gated: accept its terms at https://huggingface.co/{repo} and set HF_TOKEN to a token of that"
            " account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise error(
            f"{what} is neither a folder here nor on the hub: check {key}, and HF_TOKEN if it is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise error(f"{what} is not on the hub: set {revision_key} to a branch, tag or commit of it") from None
    except errors.LocalEntryNotFoundError:
        is_asked = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
        reason = "HF_HUB_OFFLINE is set" if is_asked else "the hub cannot be reached"
        raise error(
            f"{what} is not complete in the hub cache {constants.HF_HUB_CACHE} and {reason}:"
            f" run `hf download {repo}` where there is a network, or {remedy}"
        ) from None
    except errors.EntryNotFoundError:
        raise error(f"{what} must be in diffusers' format: it has no model_index.json") from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as failure:
        raise error(f"{what} cannot be fetched: {one_line(failure)}") from None
    finally:
        logging.set_verbosity(verbosity)
