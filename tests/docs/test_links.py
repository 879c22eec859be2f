"""What README and docs refer to exists: links, anchors, modules, files, config keys, metrics."""

import importlib.util
import re
import types
import typing
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowcredit.packages import PACKAGES
from protocol.config.run import RunConfig
from tests.support.pages import PAGES, metric_patterns, name_of
from tests.support.paths import ROOT

FOLDERS = "|".join((*PACKAGES, "flowcredit", "benchmarks", "tests", "docs", "world"))
METRIC = re.compile(
    r"(?:reward|group|gain|credit|advantage|train|policy|seconds|evaluation|reward_pool|ledger|probe|adapter)/[\w<>{},/]+"
)


def without_code(text: str) -> str:
    """The text without fenced blocks and inline code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Relative links and anchors that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def absent_modules(page: Path, text: str) -> Iterator[str]:
    """Modules of shown commands that do not exist."""
    for module in re.findall(r"python -m ((?:benchmarks|toyworld|tests|deploy|flowcredit)[\w.]*\w)", text):
        if not importlib.util.find_spec(module):
            yield module


def absent_files(page: Path, text: str) -> Iterator[str]:
    """Named files that do not exist."""
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./*-]*)`", text):
        if not any(next(base.glob(path.rstrip("/")), None) for base in (ROOT, page.parent)):
            yield path


def keys(text: str) -> Iterator[str]:
    """Dotted config keys in inline code, and those that `key=value` sets anywhere."""
    for code in re.findall(r"`([^`\n]+)`", text):
        yield from re.findall(r"^([a-z_]+(?:\.[a-z_*A-Z]+)+)(?:[:=].*)?$", code)
    yield from re.findall(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)+)=", text)


def parts(annotation: object) -> Iterator[object]:
    """The annotation and what it is made of."""
    yield annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, dict, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from parts(part)


def is_key(key: str, model: type[BaseModel]) -> bool:
    """Does the config have this key? `*` is any key of a section; keys of a mapping are free."""
    first, _, rest = key.partition(".")
    fields = (
        model.model_fields.values()
        if first == "*"
        else [model.model_fields[first]]
        if first in model.model_fields
        else []
    )
    if not rest:
        return bool(fields)
    for field in fields:
        sections = [part for part in parts(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        if typing.get_origin(field.annotation) is dict and not sections:
            return True
        below = rest.partition(".")[2] if typing.get_origin(field.annotation) is dict else rest
        if any(not below or is_key(below, section) for section in sections):
            return True
    return False


def unknown_keys(page: Path, text: str) -> Iterator[str]:
    """Named config keys that no config has."""
    for key in keys(text):
        is_file = key.endswith((".py", ".yaml", ".json", ".jsonl", ".md"))
        if key.split(".")[0] in RunConfig.model_fields and not is_file and not is_key(key, RunConfig):
            yield key


def undocumented_metrics(page: Path, text: str) -> Iterator[str]:
    """Named metrics that docs/metrics.md does not list."""
    known = metric_patterns()
    for code in re.findall(r"`([^`\n]+)`", text):
        name = re.sub(r"<\w+>|\{[^}]*\}", "*", code)
        is_metric = METRIC.fullmatch(code) and not (ROOT / code).exists()
        if is_metric and not any(fnmatchcase(name, pattern) for pattern in known):
            yield code


@pytest.mark.parametrize("kind", [broken_links, absent_modules, absent_files, unknown_keys, undocumented_metrics])
def test_what_the_pages_refer_to_exists(kind: Callable[[Path, str], Iterator[str]]) -> None:
    wrong = [f"{name_of(page)}: {each}" for page in PAGES for each in kind(page, page.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)
