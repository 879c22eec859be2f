"""The documentation site (`make docs`) leads to every page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.sink import CONDITIONS
from tests.support.pages import PAGES
from tests.support.paths import ROOT
from tests.support.services.browsing import resize, started_browser

SITE = yaml.safe_load((ROOT / "properdocs.yml").read_text(encoding="utf-8"))


def pages(nav: Any) -> Iterator[str]:
    """The pages of a navigation tree."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(each)


def test_every_page_is_in_the_menu_or_linked_from_a_page() -> None:
    menu = list(pages(SITE["nav"]))
    assert len(menu) == len(set(menu))
    found = {ROOT / "docs" / page for page in menu}
    for page in PAGES:
        targets = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        found |= {(page.parent / target).resolve() for target in targets}
    assert [page for page in (ROOT / "docs").rglob("*.md") if page not in found] == []


def test_a_search_for_prompts_finds_the_page_of_prompts_first() -> None:
    """Titles weigh most, so this page, Yours and the toy world's prompts compete; the search multiplies its score."""
    page = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")
    _, front, body = page.split("---\n", 2)
    assert yaml.safe_load(front) == {"search": {"boost": 4}} and body.startswith("\n# Your prompts\n")


def test_every_condition_that_the_code_sets_is_described() -> None:
    """Types stand in the calls themselves, in `kind = …`, in `CONDITION = …`, or are yielded by `concerns`."""
    pattern = r'(?:condition\(\s*f?|kind(?:, \w+)? = |CONDITION = |yield \(?\s*)"([A-Z][A-Za-z]+)["/]'
    folders = ("rewards", "learner", "actors", "deploy")
    code = "".join(path.read_text(encoding="utf-8") for each in folders for path in (ROOT / each).rglob("*.py"))
    assert set(re.findall(pattern, code)) == set(CONDITIONS)


@pytest.mark.whole
def test_a_wide_table_is_as_narrow_as_a_phone_and_its_cells_have_their_headings(tmp_path: Path) -> None:
    look = ROOT / "docs" / "look"
    row = "".join(f"<td>value{'_long' * 8} {column}</td>" for column in range(8))
    headings = "".join(f"<th>heading {column}</th>" for column in range(8))
    page = tmp_path / "page.html"
    page.write_text(
        f'<link rel="stylesheet" href="{(look / "narrow.css").as_uri()}"><div class="md-typeset">'
        f"<table><thead><tr>{headings}</tr></thead><tbody><tr>{row}</tr></tbody></table></div>"
        f'<script src="{(look / "narrow.js").as_uri()}"></script>'
    )
    width = "return document.documentElement.scrollWidth"
    beside = "return getComputedStyle(document.querySelectorAll('td')[3], '::before').content"
    with started_browser() as browser:
        browser.get(page.as_uri())
        assert browser.execute_script(width) > 1200 and browser.execute_script(beside) == "none"
        resize(browser, 400)
        assert browser.execute_script(width) <= 400 and browser.execute_script(beside) == '"heading 3"'
