"""The clauses of a GenEval prompt, read and checked from its metadata line.

`read_clauses(metadata)` runs for every prompt before a run starts, and again for each prompt whose images are judged.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from protocol.errors import PromptError, suggest
from protocol.messages import Metadata

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""GenEval's six kinds of prompt."""
RELATIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True, slots=True, kw_only=True)
class Included:
    """Objects that the image must show: `count` of one class, optionally with a colour and a position."""

    label: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None
    """The relation, and the index of the earlier item of `include` that it refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Objects that the image must not show: it may hold fewer than `count` of the class."""

    label: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Clauses:
    include: tuple[Included, ...]
    exclude: tuple[Excluded, ...]

    @cached_property
    def wanted(self) -> Mapping[str, int]:
        """Number of objects of each included class, summed over the items of that class."""
        total: Counter[str] = Counter()
        for item in self.include:
            total[item.label] += item.count
        return total

    @cached_property
    def colored(self) -> frozenset[str]:
        """The classes whose colour the prompt asks for."""
        return frozenset(item.label for item in self.include if item.color is not None)


def read_clauses(metadata: Metadata) -> Clauses:
    """Read `tag`, `include` and `exclude` of a metadata line; ignore other top-level keys.

    `include` may name a class more than once only if the items differ in colour ("a red circle and a blue circle").
    Otherwise one object could satisfy two items. GenEval's own prompts never name a class twice.

    Raises:
        PromptError: a key is missing, unknown or of the wrong kind, or clauses contradict each other.
    """
    if not isinstance(metadata, Mapping) or "include" not in metadata:
        got = sorted(metadata) if isinstance(metadata, Mapping) else type(metadata).__name__
        raise PromptError(
            f"GenEval metadata must hold `tag` and `include`, got {got}: use a .jsonl prompt file, or another reward"
        )
    tag = metadata.get("tag")
    if tag not in TAGS:
        raise PromptError(f"tag must be one of GenEval's six, got {tag!r}: {suggest(str(tag), TAGS)}")
    lines = _list_of(metadata, "include")
    if not lines:
        raise PromptError("include must name at least one class, got []: there is nothing to look for")
    include = tuple(_included(line, index) for index, line in enumerate(lines))
    exclude = tuple(_excluded(line, index) for index, line in enumerate(_list_of(metadata, "exclude")))
    clauses = Clauses(include=include, exclude=exclude)
    _check_consistent(clauses)
    return clauses


def _list_of(metadata: Metadata, key: str) -> Sequence[Any]:
    lines = metadata.get(key, [])
    if not isinstance(lines, list | tuple):
        raise PromptError(f"{key} must be a list of clauses, got {lines!r}")
    return lines


def _included(line: Any, index: int) -> Included:
    where = f"include[{index}]"
    label, count = _class_and_count(line, where, known=("class", "count", "color", "position"))
    color = line.get("color")
    if color is not None and (not isinstance(color, str) or not color):
        raise PromptError(f"{where}.color must be a colour's name, got {color!r}")
    position = line.get("position")
    if position is not None:
        if not isinstance(position, list | tuple) or len(position) != 2:
            raise PromptError(f"{where}.position must be [relation, index], got {position!r}")
        relation, reference = position
        if relation not in RELATIONS:
            raise PromptError(f"{where}.position: unknown relation {relation!r}: {suggest(str(relation), RELATIONS)}")
        if not isinstance(reference, int) or isinstance(reference, bool) or not 0 <= reference < index:
            raise PromptError(f"{where}.position must refer to an earlier item of include, got index {reference!r}")
        position = (relation, reference)
    return Included(label=label, count=count, color=color, position=position)


def _excluded(line: Any, index: int) -> Excluded:
    label, count = _class_and_count(line, f"exclude[{index}]", known=("class", "count"))
    return Excluded(label=label, count=count)


def _class_and_count(line: Any, where: str, *, known: Sequence[str]) -> tuple[str, int]:
    if not isinstance(line, Mapping):
        raise PromptError(f"{where} must hold `class` and `count`, got {line!r}")
    for key in line:
        if key not in known:
            raise PromptError(f"{where} has an unknown key {key!r}: {suggest(str(key), known)}")
    label, count = line.get("class"), line.get("count")
    if not isinstance(label, str) or not label:
        raise PromptError(f"{where}.class must be a class's name, got {label!r}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PromptError(f"{where}.count must be a whole number of at least 1, got {count!r}")
    return label, count


def _check_consistent(clauses: Clauses) -> None:
    items = Counter(item.label for item in clauses.include)
    pairs = Counter((item.label, item.color) for item in clauses.include)
    for (label, color), times in pairs.items():
        if times > 1 or (color is None and items[label] > 1):
            raise PromptError(
                f"include may name {label!r} twice only with different colours: join the items or colour each"
            )
    for item in clauses.exclude:
        needed = clauses.wanted.get(item.label, 0)
        if needed >= item.count:
            raise PromptError(
                f"exclude must not contradict include, got {item.label!r}: include needs {needed},"
                f" exclude forbids {item.count}: raise the excluded count to {needed + 1}"
            )
