"""The documentation site (`make docs`) leads to every page."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from protocol.sink import CONDITIONS
from tests.support.paths import ROOT

SITE = yaml.safe_load((ROOT / "properdocs.yml").read_text(encoding="utf-8"))
MADE = (
    *("index.md", "toyworld.md", "changelog.md", "contributing.md"),
    *(f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")),
)
"""Pages that `docs/site.py` makes, beside `reference/`."""


def pages(nav: Any) -> Iterator[str]:
    """The pages of a navigation tree."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(each)


def test_the_navigation_has_every_page_once() -> None:
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    listed = [page for page in pages(SITE["nav"]) if page not in MADE and not page.startswith("reference/")]
    assert sorted(listed) == sorted(written)


def test_every_condition_that_the_code_sets_is_described() -> None:
    """Types stand in the calls themselves, in `kind = …`, in `CONDITION = …`, or are yielded by `concerns`."""
    pattern = r'(?:condition\(\s*f?|kind(?:, \w+)? = |CONDITION = |yield \(?\s*)"([A-Z][A-Za-z]+)["/]'
    folders = ("rewards", "learner", "actors", "deploy")
    code = "".join(path.read_text(encoding="utf-8") for each in folders for path in (ROOT / each).rglob("*.py"))
    assert set(re.findall(pattern, code)) == set(CONDITIONS)
