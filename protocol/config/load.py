"""Reading a RunConfig: a YAML preset and `key=value` overrides.

    config = load_config("my_preset.yaml", overrides=["group.size=16", "method=tp_grpo"])

From weak to strong: defaults, the method's `settings`, the file, the method's `identity`, the overrides. A file that
names its method itself is stronger than that method; an override `method=NAME` takes its place. Unknown keys are
refused with a suggestion, wrong values with rule, value and remedy (`ConfigError`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from protocol.config.method import merge, read_method
from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, one_line
from protocol.spelling import suggest

METHOD = "method="


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply `key=value` overrides.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value; one line with the remedy.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist: name a preset or a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not YAML: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got {type(tree).__name__}")
    own = tree.pop("method", None)
    named = [override.removeprefix(METHOD) for override in overrides if override.startswith(METHOD)]
    if named:
        tree = with_method(tree, named[-1])
    elif own is not None:
        tree = merge(with_method({}, own), tree)
    for override in overrides:
        if not override.startswith(METHOD):
            _apply(tree, override)
    return parse_config(tree)


def with_method(tree: dict[str, Any], name: object) -> dict[str, Any]:
    """A config tree that follows a named method: its settings under the tree's own keys, its identity over them.

    Raises:
        ConfigError: no method of this name.
    """
    method = read_method(name)
    return merge(merge(method["settings"], tree), method["identity"])


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validate a tree; the first broken rule becomes one line (`ConfigError`)."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0])) from None
    except OverflowError as error:
        raise ConfigError(f"a number of the config is too large: {error}") from None


def parse_reward(name: str, tree: Any) -> RewardConfig:
    """Validate the section of one reward; the first broken rule becomes one line (`ConfigError`)."""
    try:
        return RewardConfig.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(_explain({**problem, "loc": ("rewards", name, *problem["loc"])})) from None


def read_value(key: str, text: str) -> Any:
    """The YAML value of a `key=text` on a command line (`ConfigError` when it is none)."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"the value of {key} is not YAML, got {text!r}: quote it") from None
    return _number(value) if isinstance(value, str) else value


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


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-4 as text; a user means the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    dotted = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}: {suggest(location[-1], _known_keys(location[:-1]))}"
    if problem["type"] == "missing":
        return f"{dotted} must be given"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    return f"{dotted}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _known_keys(path: list[str]) -> list[str]:
    section: Any = RunConfig
    for part in path:
        if section is dict:
            section = RewardConfig
            continue
        annotation = section.model_fields[part].annotation
        section = dict if get_args(annotation) else annotation
    return list(section.model_fields)
