"""Named methods: the published algorithms as config files, usable on every preset as `method=NAME`.

A method file has three keys: `about`, a sentence with its source; `identity`, the keys that make the method what it is,
which win over a preset; and `settings`, the scale at which its paper ran it (steps, group sizes, learning rate), which
stand only where a preset is silent.
"""

from pathlib import Path
from typing import Any

import yaml

from protocol.errors import ConfigError
from protocol.resources import resolve
from protocol.spelling import suggest

FOLDER = "pkg://deploy/methods"
PARTS = {"about": str, "identity": dict, "settings": dict}


def method_names() -> list[str]:
    """Names of the methods that ship."""
    return sorted(path.stem for path in resolve(FOLDER).glob("*.yaml"))


def read_method(name: object) -> dict[str, Any]:
    """The parts of a method by their key.

    Raises:
        ConfigError: no method of this name.
    """
    if name not in method_names():
        raise ConfigError(f"unknown method {name!r}: {suggest(str(name), method_names())}")
    path: Path = resolve(FOLDER) / f"{name}.yaml"
    parts = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: parts[key] for key in PARTS}


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """One tree of both; where both have a value the second's counts."""
    merged = dict(under)
    for key, value in over.items():
        held = merged.get(key)
        merged[key] = merge(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return merged
