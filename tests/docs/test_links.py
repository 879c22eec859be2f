"""What README and docs refer to exists: links, anchors, modules, files, config keys, metrics."""

import importlib.util
import re
import types
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowcredit.packages import PACKAGES
from protocol.config.run import RunConfig
from tests.support.pages import PAGES, metric_patterns, name_of
from tests.support.paths import ROOT

BASES = {"reliability.md": [ROOT / "tests"]}
"""Further folders to which paths of a page are relative."""
FOLDERS = "|".join((*PACKAGES, "flowcredit", "benchmarks", "tests", "docs", "world"))
METRIC = re.compile(
    r"(?:reward|group|gain|credit|advantage|train|policy|seconds|evaluation|reward_pool|ledger|probe|adapter)/[\w<>{},/]+"
)

pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def without_code(text: str) -> str:
    """The text without fenced blocks and inline code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_relative_link_and_anchor_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


@pages
def test_every_module_that_a_command_runs_exists(page: Path) -> None:
    for module in re.findall(
        r"python -m ((?:benchmarks|toyworld|tests|deploy|flowcredit)[\w.]*\w)", page.read_text(encoding="utf-8")
    ):
        assert importlib.util.find_spec(module), module


@pages
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./*-]*)`", page.read_text(encoding="utf-8")):
        bases = [ROOT, page.parent, *BASES.get(page.name, [])]
        assert any(next(base.glob(path.rstrip("/")), None) for base in bases), path


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
        if typing.get_origin(field.annotation) is dict and not sections and "." not in rest:
            return True
        below = rest.partition(".")[2] if typing.get_origin(field.annotation) is dict else rest
        if any(not below or is_key(below, section) for section in sections):
            return True
    return False


@pages
def test_every_config_key_that_a_page_names_exists(page: Path) -> None:
    for key in keys(page.read_text(encoding="utf-8")):
        if key.split(".")[0] in RunConfig.model_fields and not key.endswith((".py", ".yaml", ".json", ".jsonl", ".md")):
            assert is_key(key, RunConfig), key


@pages
def test_every_metric_that_a_page_names_is_documented(page: Path) -> None:
    known = metric_patterns()
    for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        if not METRIC.fullmatch(code) or (ROOT / code).exists():
            continue
        name = re.sub(r"<\w+>|\{[^}]*\}", "*", code)
        assert any(fnmatchcase(name, pattern) for pattern in known), code
