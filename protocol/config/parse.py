"""Validate a tree of keys and values as a RunConfig; the first broken rule becomes one line (`ConfigError`)."""

from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from protocol.config.reference import sections
from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, closest, suggest

TEXTS = (str, str | None, tuple[str, ...], tuple[str, ...] | None)
"""Annotations of keys whose values are texts, even where a text looks like a number."""


WORDS = {
    "lr": ("learner.learning_rate",),
    "batch_size": ("group.per_iteration", "group.size", "model.forward_batch"),
    "steps": ("sampling.steps", "iterations"),
    "epochs": ("iterations", "learner.epochs"),
    "guidance_scale": ("model.guidance",),
    "beta": ("learner.kl.weight",),
    "resolution": ("model.height", "model.width"),
    "prompts": ("data.train", "data.heldout"),
    "reward": ("rewards.NAME.scorer",),
    "num_gpus": ("cluster.learner.workers", "cluster.rollout_actors"),
}
"""Keys of this config by the words of other programs."""
VALUES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
"""Values of this config by short names that others use."""
MAIN = {"model": "model.path", "data": "data.train", "credit": "credit.rule", "learner": "learner.objective"}
"""The key that is meant where a section is given as a text."""


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


def is_text(key: str) -> bool:
    """Tell whether a dotted key of the config holds a text or a list of texts."""
    *parents, last = key.split(".")
    section = _section(parents)
    return section is not None and last in section.model_fields and section.model_fields[last].annotation in TEXTS


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    dotted = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}: {_suggest_key(location[-1], location[:-1])}"
    if problem["type"] == "missing":
        return f"{dotted} must be given"
    if problem["type"] == "tuple_type":
        return f"{dotted} must be a list such as [{problem['input']}], got {problem['input']!r}: put it in brackets"
    if problem["type"] == "model_type" and dotted in MAIN:
        return f"{dotted} is a section, got {problem['input']!r}: write {MAIN[dotted]}={problem['input']}"
    if problem["type"] == "literal_error" and str(problem["input"]) in VALUES:
        return f"{dotted} has no value {problem['input']!r}: write {dotted}={VALUES[problem['input']]}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    return f"{dotted or 'the config'}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _suggest_key(word: str, parents: list[str]) -> str:
    """Suggest a key of this section; else one of another section, with its section."""
    section = _section(parents)
    if not parents and word in WORDS:
        return f"write {' or '.join(WORDS[word])}"
    here = list(section.model_fields) if section else []
    last = {key.key: key.key.rpartition(".")[2] for each in sections() for key in each.keys}
    is_word = word in last.values() or closest(word, here)
    meant = word if is_word else closest(word, last.values(), cutoff=0.8)
    if elsewhere := [key for key, name in last.items() if name == meant]:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return suggest(word, here)


def _section(path: list[str]) -> type[BaseModel] | None:
    """Find the class of a section; None where there is none."""
    is_of_reward = path[:1] == ["rewards"] and len(path) > 1
    return _sections().get(".".join(["rewards", "NAME", *path[2:]] if is_of_reward else path))


@cache
def _sections() -> dict[str, type[BaseModel]]:
    return {section.name: section.model for section in sections()}
