"""Presets and named methods, and how `key=value` overrides change them.

    config = load_config("toy_geneval", overrides=["group.size=16", "method=tp_grpo"])

Each of these layers overrides the ones before it: the defaults, the method's `settings`, the YAML file, the method's
`identity`, the overrides. A file that names a method itself overrides that method; an override `method=NAME` replaces
the file's method.

In a file, `here://train.txt` is a path relative to the file's own folder; other relative paths start in the working
folder.

A file may extend another preset: `base: toy_geneval`, or `base: other.yaml`, a path relative to the file's own folder.
It then holds only the differences. A method that it names replaces the methods of the files that it extends.

`rewards` adds to the rewards of the layers below, in a file and as an override. A reward is removed with null:
`rewards.pickscore=null`.

A method is a published algorithm that can be applied to any preset. In its file `about` is a sentence with its source;
`identity` holds the keys that define the method, which override a preset; `settings` is the scale at which its paper
ran it (steps, group sizes, learning rate), which applies only to keys that a preset does not set. A file holds only
what differs from the method that its `base` names; the last base is `methods/base.yaml`, which lists what every method
decides.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from protocol.errors import ConfigError, one_line, suggest

if TYPE_CHECKING:
    from protocol.config.run import RunConfig

PRESETS, METHODS = Path(__file__).parent / "presets", Path(__file__).parent / "methods"
METHOD, BASE, REWARDS = "method", "base", "rewards"
HERE = "here://"
DEFAULT = "default"
"""The source of a value that no layer sets: it is flowcredit's or the model's."""
WORDS: Mapping[object, str] = {"ppo": "flow_grpo", "grpo": "flow_grpo", "ddpo": "flow_grpo", "nft": "diffusion_nft"}
"""Methods by the words of other programs."""
Overrides = Sequence[str] | Mapping[str, Any]
"""Texts `key=value`, or values by dotted key."""


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def method_names() -> list[str]:
    return sorted(path.stem for path in METHODS.glob("*.yaml") if path.stem != BASE)


def find_preset(preset: str | Path) -> Path:
    """Return the YAML file of a preset, given its name or a path that ends in .yaml or .yml.

    Raises:
        ConfigError: it is neither.
    """
    name = str(preset)
    if name in preset_names():
        return PRESETS / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    raise ConfigError(f"unknown preset {name!r}: {suggest(name, preset_names())}; or give the path of a .yaml file")


def load_config(preset: str | Path, *, overrides: Overrides = ()) -> "RunConfig":
    """Read a preset and apply overrides, which may include a `method`.

    Raises:
        ConfigError: there is no such preset, a file is not readable, a key is unknown, or a type or value is wrong.
    """
    from protocol.config.parse import parse_config

    layers, assignments = _layers(preset, overrides)
    tree: dict[str, Any] = {}
    for _, layer in layers:
        tree = _apply(tree, layer)
    for key, value in assignments:
        if key == REWARDS and isinstance(value, dict):
            tree = _apply(tree, {key: value})
        else:
            _assign(tree, key, value)
    return parse_config(tree)


def sources(preset: str | Path, *, overrides: Overrides = ()) -> dict[str, str]:
    """Return the layer of `load_config` that set each dotted key; defaults are left out.

    Raises:
        ConfigError: as `load_config`.
    """
    from protocol.config.run import flatten

    layers, assignments = _layers(preset, overrides)
    found = {key: source for source, layer in layers for key in flatten(layer)}
    for key, value in assignments:  # each replaces a whole section, except `rewards`
        if key != REWARDS:
            found = {each: source for each, source in found.items() if not each.startswith(f"{key}.")}
        found |= dict.fromkeys(flatten({key: value}), "override")
    return found


def about_preset(name: str) -> str:
    """Return the first sentence of a preset's first comment."""
    comment = find_preset(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
    return re.split(r"(?<=[.;])\s", comment)[0].rstrip(".;")


def preset_files(preset: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """Read the files of a preset, from its outermost base to the preset itself, without their `base`.

    Raises:
        ConfigError: a file cannot be read, or extends itself.
    """
    path = find_preset(preset)
    found: list[tuple[Path, dict[str, Any]]] = []
    while True:
        tree = _at_home(read_tree(path), path.parent)
        base = tree.pop(BASE, None)
        found.insert(0, (path, tree))
        if base is None:
            return found
        if not isinstance(base, str):
            raise ConfigError(
                f"{BASE} in {path} must be the name of a preset or the path of a .yaml file, got {base!r}"
            )
        path = path.parent / find_preset(base)
        if path.resolve() in [seen.resolve() for seen, _ in found]:
            raise ConfigError(
                f"{BASE} in {found[0][0]} must lead to a preset that extends none, got a circle at {path}"
            )


def _at_home(value: Any, folder: Path) -> Any:
    """Replace `here://` at the start of every text of a file by the folder that holds the file."""
    if isinstance(value, dict):
        return {key: _at_home(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_at_home(each, folder) for each in value]
    is_here = isinstance(value, str) and value.startswith(HERE)
    return os.fspath(folder / value.removeprefix(HERE)) if is_here else value


def _layers(preset: str | Path, overrides: Overrides) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, Any]]]:
    """Return the layers of a config, the later ones override the earlier ones, and the overrides without `method`."""
    given = list(_assignments(overrides))
    assignments = [(key, value) for key, value in given if key != METHOD]
    files = preset_files(preset)
    layers = [(f"preset {path.stem}" if path.parent == PRESETS else f"file {path}", tree) for path, tree in files]
    names = [(number, tree.pop(METHOD)) for number, (_, tree) in enumerate(files) if METHOD in tree]
    names += [(len(files), value) for key, value in given if key == METHOD]
    if not names or names[-1][1] is None:
        return layers, assignments
    number, name = names[-1]
    method = read_method(name)
    settings, identity = (f"method {name}", method["settings"]), (f"method {name}", method["identity"])
    return [settings, *layers[:number], identity, *layers[number:]], assignments


def _assignments(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Yield each override's dotted key and value."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise ConfigError(
            f'overrides must be texts or values by key, got {overrides!r}: write ["seed=3"] or {{"seed": 3}}'
        )
    pairs = overrides.items() if isinstance(overrides, Mapping) else ((override, None) for override in overrides)
    for override, value in pairs:
        if not isinstance(override, str):
            raise ConfigError(f"an override must be a text such as seed=3 or a mapping's key, got {override!r}")
        if isinstance(overrides, Mapping):
            yield override, os.fspath(value) if isinstance(value, os.PathLike) else value
            continue
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"an override must read key=value, got {override!r}")
        yield key, text if key == METHOD else read_value(key, text)


class UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses a repeated key in a section; PyYAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Construct a section whose keys are all different."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a section as a key: PyYAML refuses it
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated in one section: join the two", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Raises:
        ConfigError: the file does not exist, is not readable, or holds something else.
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
    """Return a method's `about`, and its `identity` and `settings` over its base's.

    Raises:
        ConfigError: there is no method of this name.
    """
    if name not in method_names():
        if str(name).endswith((".yaml", ".yml")):
            raise ConfigError(
                f"method must be a name, got the file {name}: give a file with `method: NAME` as the preset"
            )
        remedy = f"write method={WORDS[name]}" if name in WORDS else suggest(str(name), method_names())
        raise ConfigError(f"unknown method {name!r}: {remedy}")
    method = read_tree(METHODS / f"{name}.yaml")
    under = read_method(method[BASE]) if BASE in method else read_tree(METHODS / f"{BASE}.yaml")
    parts = {part: merge(under[part], method.get(part, {})) for part in ("identity", "settings")}
    return {"about": method["about"], **parts}


def method_of(config: "RunConfig") -> str:
    """Return the name of the method whose identity a config has; empty if it is none of ours."""
    fields = config.flat_fields()
    return next((name for name, own in _identities().items() if all(fields.get(k) == v for k, v in own.items())), "")


@cache
def _identities() -> dict[str, dict[str, Any]]:
    """Read the identity of every method by dotted key, the longest first."""
    from protocol.config.run import flatten

    found = {name: flatten(read_method(name)["identity"]) for name in method_names()}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees; where both have a value, `over` counts."""
    merged = dict(under)
    for key, value in over.items():
        held = merged.get(key)
        merged[key] = merge(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return merged


def read_value(key: str, text: str) -> Any:
    """Parse the YAML value of a `key=text` on a command line; raise ConfigError if it is not YAML.

    If the config expects a text, the value stays one even if it looks like a number: `model.revision=7e10`.
    """
    from protocol.config.parse import is_text

    try:
        value = yaml.load(text, UniqueKeys)
        if value is not None and is_text(key):
            return yaml.load(text, yaml.BaseLoader)  # reads every scalar as text
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"the value of {key} is not YAML, got {text!r}: quote it ({one_line(error)})") from None
    if not isinstance(value, str):
        return value
    try:
        return float(value)  # YAML 1.1 reads 1e-4 as text, but a user means the number
    except ValueError:
        return value


def _apply(tree: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Merge a layer into the layers before it; a reward that is null in the layer is removed."""
    rewards = layer.get("rewards")
    removed = [name for name, reward in rewards.items() if reward is None] if isinstance(rewards, dict) else []
    held = tree.get("rewards") or {}
    for name in removed:
        _require_reward(held, name)
    merged = merge(tree, layer)
    return merged | {"rewards": {k: v for k, v in merged["rewards"].items() if k not in removed}} if removed else merged


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"{key} is unknown: {parent} is a value, not a section")
    if value is None and parents == ["rewards"]:
        _require_reward(node, last)
        del node[last]
    else:
        node[last] = value


def _require_reward(rewards: Mapping[str, Any], name: str) -> None:
    if name not in rewards:
        known = list(map(str, rewards))
        raise ConfigError(f"rewards.{name} is null and there is no such reward to remove: {suggest(str(name), known)}")
