"""Load a scorer's weights from a folder, a `pkg://` path or a hub id, and turn every failure into one line.

model = load_pretrained(CLIPModel.from_pretrained, "openai/clip-vit-large-patch14", dtype=torch.float32)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from protocol.errors import ConfigError, ScorerError, one_line
from protocol.hub import is_hub_id, require_on_hub
from protocol.resources import SCHEME, resolve

Loaded = TypeVar("Loaded")


def load_pretrained(load: Callable[..., Loaded], source: str, **options: Any) -> Loaded:
    """Call `load(source, **options)` without progress bars.

    Args:
        load: a function such as `CLIPModel.from_pretrained`.
        source: a folder, a `pkg://` path, or a hub id.
        options: further arguments of `load`.

    Returns:
        The result of `load`.

    Raises:
        ScorerError: the weights do not exist or cannot be read.
    """
    try:
        path = str(resolve(source)) if source.startswith((SCHEME, "~")) else source
        with _no_progress_bars():
            return load(path, **options)
    except (OSError, ValueError, ConfigError) as error:
        reason = one_line(error)
        raise ScorerError(
            f"weights {source!r} cannot be loaded: {reason}; give a folder, or download them first"
        ) from error


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
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()
