"""Read a scorer's weights in the layout of its authors' own package: one file of tensors by name.

tensors = load_pretrained(read_tensors, "zai-org/ImageReward", file="ImageReward.pt")
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from protocol.errors import ScorerError, one_line
from protocol.ground.hub import cached_on_hub, is_hub_id
from protocol.ground.resources import resolve
from rewards.pretrained import load_pretrained, require_pretrained


def read_tensors(source: str, *, file: str, is_outline: bool = False) -> dict[str, Any]:
    """Read all tensors of a checkpoint.

    Args:
        source: a file, a folder that holds `file`, or the hub id of a repository that holds it.
        file: the authors' file name; a source with its ending, `.pt` or `.safetensors`, is a file.
        is_outline: read the header only; the tensors lie on the device `meta`.
    """
    import torch
    from huggingface_hub import hf_hub_download
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = Path(source)
    if path.is_dir():
        path /= file
    found = path if _is_file(source, file) or path.name == file else hf_hub_download(source, file)
    if file.endswith(".safetensors") and is_outline:
        with safe_open(found, framework="pt") as held:
            shapes = {name: held.get_slice(name).get_shape() for name in held.keys()}  # noqa: SIM118
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if file.endswith(".safetensors"):
        return load_file(found)
    where = "meta" if is_outline else "cpu"
    return torch.load(found, map_location=where, weights_only=True, mmap=is_outline and is_zipfile(found))


def checkpoint_outline(source: str, *, file: str) -> dict[str, Any] | None:
    """Read the header of a checkpoint; None if it is on the hub and not in its cache.

    Raises:
        ScorerError: it cannot be read.
    """
    if is_hub_id(source) and not resolve(source).exists():
        held = cached_on_hub(source)
        if held is None or not (held / file).exists():
            return None
        source = str(held)
    return load_pretrained(read_tensors, source, file=file, is_outline=True)


def require_checkpoint(source: str, *, file: str) -> None:
    """Raise ScorerError if the source of `read_tensors` is missing."""
    require_pretrained(source, *([] if _is_file(source, file) else [file]))


def _is_file(source: str, file: str) -> bool:
    return source.endswith(Path(file).suffix)


@contextmanager
def holds_tensors(source: str, scorer: str, remedy: str) -> Iterator[Callable[[Iterable[str], Iterable[str]], None]]:
    """Turn what the block finds wrong with a checkpoint's tensors into a ScorerError.

    Yields:
        A function of the names that the checkpoint lacks and of names that the scorer does not have; it refuses both.

    Raises:
        ScorerError: a tensor is missing (KeyError), shapes do not fit (RuntimeError), or names are refused.
    """
    must = f"{source} must hold {scorer}'s tensors"

    def require_names(lacking: Iterable[str], foreign: Iterable[str]) -> None:
        missing, unknown = sorted(lacking), sorted(foreign)
        if missing or unknown:
            got = f"{len(missing)} missing {missing[:3]} and {len(unknown)} unknown {unknown[:3]}"
            raise ScorerError(f"{must}, got {got}: {remedy}")

    try:
        yield require_names
    except KeyError as error:
        raise ScorerError(f"{must}, got none named {error}: {remedy}") from None
    except RuntimeError as error:
        raise ScorerError(f"{must} in shapes that fit each other, got {one_line(error)}: {remedy}") from None


def numbers(names: Iterable[str], prefix: str) -> list[int]:
    """Return the numbers that follow a prefix in tensors' names, in order."""
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in names)
    return sorted({int(each[1]) for each in found if each})


def linear_head(
    shapes: Mapping[str, tuple[int, ...]], prefix: str, *, inputs: int, outputs: int, activation: Any = None
) -> Any:
    """Build the linear layers `<prefix>.N` of a checkpoint, one after the other; dropout between them does nothing.

    Args:
        prefix: the part of the names before the layers' numbers.
        inputs: input width of the first layer.
        outputs: output width that the last layer must have.
        activation: class of the modules between the layers; None if there are none.

    Returns:
        A `Sequential` whose tensors have the names `N.weight` and `N.bias`.

    Raises:
        KeyError: there are no such layers, or the last one has another output width.
    """
    from torch import nn

    head, width = nn.Sequential(), inputs
    for number in numbers(shapes, prefix):
        if len(head) and activation is not None:
            head.add_module(f"before_{number}", activation())
        reached = shapes[f"{prefix}.{number}.weight"][0]
        head.add_module(str(number), nn.Linear(width, reached))
        width = reached
    if not len(head) or width != outputs:
        raise KeyError(f"{prefix}.N.weight of output width {outputs}")
    return head
