"""Every key of the config tree with its type, range, default and meaning, read from the classes of the sections."""

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from protocol.config.run import RunConfig


@dataclass(frozen=True)
class Key:
    """One key; `NAME` in it stands for a name that the user gives."""

    key: str
    kind: str
    """The type in words: a literal as its values, a union with |."""
    limits: str
    """The range, empty where any value will do."""
    default: str
    """As one would write it in YAML; `required` for a key without one."""
    meaning: str
    """With unit and range."""


@dataclass(frozen=True)
class SectionKeys:
    """One section of the tree, without the sections inside it."""

    name: str
    """Dotted; empty for the whole tree."""
    model: type[BaseModel]
    about: str
    keys: list[Key]


def sections(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[SectionKeys]:
    """Yield a section, then the sections inside it; `prefix` is the section's name with a dot at its end."""
    own, inner = [], []
    for name, field in model.model_fields.items():
        key, section = f"{prefix}{name}", _nested(field.annotation)
        if section:
            inner.append((section, f"{key}.NAME." if typing.get_origin(field.annotation) is dict else f"{key}."))
            continue
        limits = ", ".join(filter(None, map(_limit, field.metadata)))
        own.append(Key(key, _kind(field.annotation), limits, _default(field), _plain(field.description or "")))
    yield SectionKeys(prefix.rstrip("."), model, _plain((model.__doc__ or "").split("\n\n")[0]), own)
    for section, inside in inner:
        yield from sections(section, inside)


def _nested(annotation: Any) -> type[BaseModel] | None:
    """Find the section behind an annotation; None for a plain value."""
    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _kind(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if each is type(None) else _kind(each) for each in typing.get_args(annotation))
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin:
        inner = ", ".join(_kind(each) for each in typing.get_args(annotation) if each is not Ellipsis)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined and not field.default_factory:
        return "required"
    if field.default_factory_takes_validated_data:
        return "from other keys"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, (tuple, frozenset)):
        value = list(value)
    return json.dumps(value) if isinstance(value, bool | list | None) else str(value)


def _limit(metadata: Any) -> str:
    """Write a range, from annotated-types' marks."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {_shortened(getattr(metadata, name))}" for name, sign in signs.items() if hasattr(metadata, name)]
    return ", ".join(found)


def _shortened(number: float) -> str:
    return "2^63" if number == 2**63 else f"{number:g}"


def _plain(text: str) -> str:
    return " ".join(text.split())
