"""The documentation site (`make docs`) leads to every page."""

from collections.abc import Iterator
from typing import Any

import yaml

from tests.support.paths import ROOT

SITE = yaml.safe_load((ROOT / "properdocs.yml").read_text(encoding="utf-8"))
MADE = ("index.md", "toyworld.md", "changelog.md", "contributing.md")
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
