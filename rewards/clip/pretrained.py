"""Load a scorer's weights from a folder, a `pkg://` path or a hub id, and turn every failure into one line.

model = load_pretrained(CLIPModel.from_pretrained, "openai/clip-vit-large-patch14", dtype=torch.float32)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from protocol.errors import ConfigError, ScorerError, one_line
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
