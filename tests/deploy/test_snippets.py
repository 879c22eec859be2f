"""The Python of docs and of the toy world's page runs.

`tests/deploy/cli/test_shown_commands.py` runs the commands, `tests/rewards/test_docs.py` the scorers, and
`tests/docs/test_commands.py` reads the YAML.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowcredit
from deploy.presets import load_config
from tests.support.pages import PAGES, name_of
from tests.support.paths import ROOT


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(code: str, page: str) -> dict[str, Any]:
    """Run code of a page; its names."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, page, "exec"), names)
    return names


def test_every_snippet_is_here() -> None:
    pages = {name_of(page): re.findall(r"^```(\w+)", page.read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES}
    held = {name: set(languages) - {"text"} for name, languages in pages.items()}
    assert {name for name, languages in held.items() if languages} == {
        "README.md",
        "docs/python.md",
        "docs/rewards.md",
        "toyworld/README.md",
    }
    assert set.union(*held.values()) == {"python", "yaml"}


def test_python_s_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("\n".join(blocks("docs/python.md")), "docs/python.md")
    assert len(flowcredit.read_run("runs/python").iterations) == 3
    assert (names["base"].name, names["adapter"].iteration) == ("base", 2)


def test_the_scorer_that_sees_a_group_is_shown_in_a_section_that_a_config_takes() -> None:
    (section,) = (yaml.safe_load(text) for text in blocks("docs/rewards.md", "yaml"))
    chosen = ["method=flow_grpo", "evaluation.component=clipscore"]
    read = load_config("toy_geneval", overrides=[f"rewards={json.dumps(section['rewards'])}", *chosen])
    assert (read.rewards["wins"].scorer, read.rewards["wins"].sees) == ("win_rate", "group")


def test_the_snippet_of_the_toy_world_s_page_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("toyworld/README.md")
    (tmp_path / "toyworld").symlink_to(ROOT / "toyworld")
    monkeypatch.chdir(tmp_path)
    run(code, "toyworld/README.md")
    assert (tmp_path / "circle.png").stat().st_size > 0
