"""Presets and named methods, and how `key=value` overrides change them.

    config = load_config("toy_geneval", overrides=["group.size=16", "method=tp_grpo"])

From weak to strong: the defaults, the method's `settings`, the YAML file, the method's `identity`, the overrides. A
file that names a method itself is stronger than that method; an override `method=NAME` replaces the file's method.

A method is a published algorithm that can be laid over any preset. Its file has three keys: `about` is a sentence with
its source; `identity` holds the keys that define the method, which win over a preset; `settings` is the scale at which
its paper ran it (steps, group sizes, learning rate), which fills in only what a preset leaves open.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from protocol.config.parse import is_text, parse_config
from protocol.config.run import RunConfig, flatten
from protocol.errors import ConfigError, one_line
from protocol.spelling import suggest

PRESETS, METHODS = Path(__file__).parent / "presets", Path(__file__).parent / "methods"
METHOD = "method="


def preset_names() -> list[str]:
    """Return the names of the presets in this package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def method_names() -> list[str]:
    """Return the names of the methods in this package."""
    return sorted(path.stem for path in METHODS.glob("*.yaml"))


def find_preset(preset: str | Path) -> Path:
    """Return the YAML file of a preset, given its name or a path that ends in .yaml or .yml.

    Raises:
        ConfigError: neither.
    """
    name = str(preset)
    if name in preset_names():
        return PRESETS / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    raise ConfigError(f"unknown preset {name!r}: {suggest(name, preset_names())}; or give the path of a .yaml file")


def load_config(preset: str | Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a preset and apply `key=value` overrides, among which `method=NAME` may be.

    Raises:
        ConfigError: no such preset, an unreadable file, an unknown key, a wrong type or value.
    """
    tree: dict[str, Any] = {}
    for _, layer in _layers(preset, overrides):
        tree = merge(tree, layer)
    for override in _assignments(overrides):
        _apply(tree, override)
    return parse_config(tree)


def sources(preset: str | Path, *, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return where the value of each dotted key comes from, among `load_config`'s layers; defaults are left out.

    Raises:
        ConfigError: as `load_config`.
    """
    found: dict[str, str] = {}
    layers = _layers(preset, overrides)
    for override in _assignments(overrides):
        _apply(alone := {}, override)
        layers.append(("override", alone))
    for source, layer in layers:
        found |= dict.fromkeys(flatten(layer), source)
    return found


def about_preset(name: str) -> str:
    """Return the first sentence of a preset's first comment."""
    comment = find_preset(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
    return re.split(r"(?<=[.;])\s", comment)[0].rstrip(".;")


def _layers(preset: str | Path, overrides: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read the files that make a config, from weak to strong, each with its name."""
    path = find_preset(preset)
    tree = read_tree(path)
    file = f"preset {path.stem}" if path.parent == PRESETS else f"file {path}"
    own = tree.pop("method", None)
    named = [override.removeprefix(METHOD) for override in overrides if override.startswith(METHOD)]
    name = named[-1] if named else own
    if name is None:
        return [(file, tree)]
    method = read_method(name)
    settings, identity = (f"method {name}", method["settings"]), (f"method {name}", method["identity"])
    return [settings, (file, tree), identity] if named else [settings, identity, (file, tree)]


def _assignments(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if not override.startswith(METHOD)]


class UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader; it refuses a key that a section holds twice, of which PyYAML drops the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Construct a section of keys that are all different."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice in one section: join the two", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Raises:
        ConfigError: the file does not exist, cannot be read, or holds something else.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist: name a preset or a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {one_line(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not YAML: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got {type(tree).__name__}")
    return tree


def read_method(name: object) -> dict[str, Any]:
    """Return a method's `about`, `identity` and `settings`.

    Raises:
        ConfigError: no method of this name.
    """
    if name not in method_names():
        raise ConfigError(f"unknown method {name!r}: {suggest(str(name), method_names())}")
    return yaml.safe_load((METHODS / f"{name}.yaml").read_text(encoding="utf-8"))


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees; where both have a value, the second one's counts."""
    merged = dict(under)
    for key, value in over.items():
        held = merged.get(key)
        merged[key] = merge(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return merged


def read_value(key: str, text: str) -> Any:
    """Parse the YAML value of a `key=text` on a command line; raises ConfigError.

    Where the config wants a text it stays one, even if it looks like a number: `model.revision=7e10`.
    """
    try:
        value = yaml.load(text, UniqueKeys)
        if value is not None and is_text(key):
            return yaml.load(text, yaml.BaseLoader)  # its scalars are texts
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"the value of {key} is not YAML, got {text!r}: quote it ({one_line(error)})") from None
    if not isinstance(value, str):
        return value
    try:
        return float(value)  # YAML 1.1 reads 1e-4 as text; a user means the number
    except ValueError:
        return value


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override must read key=value, got {override!r}")
    value = read_value(key, text)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"{key} is unknown: {parent} is a value, not a section")
    node[last] = value
