"""Validating a tree of keys and values as a RunConfig; the first broken rule becomes one line (`ConfigError`)."""

from typing import Any, get_args

from pydantic import ValidationError

from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.spelling import suggest


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validate a whole config.

    Raises:
        ConfigError: an unknown key, with a suggestion; a wrong type or value, with its rule.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0])) from None
    except OverflowError as error:
        raise ConfigError(f"a number of the config is too large: {error}") from None


def parse_reward(name: str, tree: Any) -> RewardConfig:
    """Validate the section of one reward; raises ConfigError as `parse_config`."""
    try:
        return RewardConfig.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(_explain({**problem, "loc": ("rewards", name, *problem["loc"])})) from None


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
