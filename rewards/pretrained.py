"""Load a scorer's weights from a folder, a `pkg://` path or a hub id, and turn every failure into one line.

model = load_pretrained(CLIPModel.from_pretrained, "openai/clip-vit-large-patch14", dtype=torch.float32)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from protocol.errors import ConfigError, ScorerError, one_line
from protocol.ground.hub import cached_on_hub, is_hub_id, require_on_hub
from protocol.ground.pretrained import load_tokenizer, load_whole, loaded, require_plain_weights
from protocol.ground.resources import SCHEME, resolve

Loaded = TypeVar("Loaded")


def load_pretrained(load: Callable[..., Loaded], source: str, **options: Any) -> Loaded:
    """Call `load(source, **options)` quietly; a model is whole, a tokenizer has its vocabulary.

    Args:
        load: a function such as `CLIPModel.from_pretrained`.
        source: a folder, a `pkg://` path, or a hub id.

    Raises:
        ScorerError: they do not exist or cannot be read, or the tensors do not fit the model
            (`protocol.ground.pretrained.require_tensors`).
    """
    what, remedy = f"weights {source!r}", "give a folder, or download them first"
    try:
        path = str(resolve(source)) if source.startswith((SCHEME, "~")) else source
    except ConfigError as error:
        raise ScorerError(f"{what} cannot be loaded: {one_line(error)}; {remedy}") from error
    kind: Any = getattr(load, "__self__", None)
    way: Callable[..., Any] = partial(loaded, load)
    if hasattr(kind, "_keys_to_ignore_on_load_missing") or hasattr(kind, "_model_mapping"):  # models, `AutoModel…`
        require_plain_weights(Path(path), what=what, error=ScorerError, remedy="use the unquantised model")
        way = partial(load_whole, load)
    elif hasattr(kind, "vocab_files_names"):
        way = partial(load_tokenizer, kind)
    with _quiet():
        return way(path, what=what, error=ScorerError, remedy=remedy, **options)


def require_whole(load: Callable[..., Loaded], source: str, **options: Any) -> Loaded | None:
    """Check by headers alone what `load_pretrained` checks of a model; of a hub id, check what its cache holds.

    Returns:
        The model without memory; None if there are no headers here.

    Raises:
        ScorerError: the weights cannot be read, or do not fit the model.
    """
    folder = resolve(source)
    if is_hub_id(source) and not folder.exists():
        held = cached_on_hub(source)
        if held is None or not (held / "config.json").exists():
            return None
        folder = held
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return None
    return load_pretrained(load, str(folder), device_map="meta", local_files_only=True, **options)


def require_pretrained(source: str, *patterns: str) -> None:
    """Check that a source holds a file of one of these patterns; load and download nothing.

    Args:
        source: a folder, a file, a `pkg://` path, or a hub id; for a hub id it is enough that the hub knows it.
        patterns: patterns such as `*.safetensors`; none for a file.

    Raises:
        ScorerError: the source does not exist or holds no such file.
    """
    what = f"the source of weights {source!r}"
    try:
        path = resolve(source)
    except ConfigError as error:
        raise ScorerError(f"{what} cannot be resolved: {one_line(error)}; give a folder or a hub id") from None
    if path.is_dir() and patterns:
        if not any(any(path.glob(pattern)) for pattern in patterns):
            raise ScorerError(f"{what} must hold a file {' or '.join(patterns)}, got none: give another folder")
    elif patterns and is_hub_id(source) and not path.exists():
        require_on_hub(source, patterns, what=what, error=ScorerError)
    elif patterns or not path.is_file():
        kinds = "a folder or a hub id" if patterns else "a file"
        raise ScorerError(f"{what} must be {kinds}, got neither here: correct the path, or download it first")


WEIGHTS = ("*.safetensors", "*.bin")
"""Files of a transformers folder that hold weights."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers show no progress bars and log errors only: what it warns of is refused here in one line."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
