"""Models of one process of tests: each is read from disk once, and every caller gets a transformer of its own."""

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from pathlib import Path

from flow.models.contract import Backbone
from protocol.config.model import ModelConfig
from protocol.resources import resolve

MOST_BYTES = 100_000_000
"""Larger models are not kept."""
Load = Callable[..., Backbone]


def read_once(load: Load) -> Load:
    """Wrap `load_backbone`: a config that was loaded before, from the same files, costs a copy of its transformer.

    The copies share what no test changes, the VAE and the text encoders. Models with a tiny decoder are loaded each
    time, and so are compiled ones and those on a GPU.
    """
    held: dict[tuple[object, ...], Backbone] = {}

    @wraps(load)
    def copied(config: ModelConfig, *, device: str) -> Backbone:
        files = _files(resolve(config.path))
        is_small = 0 < sum(size for _, size, _ in files) < MOST_BYTES
        if device != "cpu" or config.tiny_decoder or config.compile or not is_small:
            return load(config, device=device)
        key = (config.model_dump_json(), files)
        if key not in held:
            held[key] = load(config, device=device)
        kept = held[key]
        pipelines = [part for part in vars(kept).values() if hasattr(part, "components")]
        parts = [*vars(kept).values(), *(part for pipeline in pipelines for part in pipeline.components.values())]
        own = {id(part) for part in (kept.transformer, *pipelines)}
        return deepcopy(kept, {id(part): part for part in parts if id(part) not in own})

    return copied


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of each file of a folder."""
    found = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)
