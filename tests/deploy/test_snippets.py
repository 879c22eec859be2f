"""The Python and YAML of README and docs run; `tests/deploy/cli/test_shown_commands.py` runs the commands."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import flowcredit
from deploy.presets import load_config
from tests.support.pages import PAGES, name_of
from tests.support.paths import ROOT

SECTION = re.compile(r"^    (rewards|credit|geneval): ?(\{.*\}.*\n|\n(?:      .*\n)+)", re.MULTILINE)
"""YAML among the pages' blocks; all other indented blocks are commands, formulas and output."""


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
    # README's scorer trains in tests/deploy/cli/test_shown_commands.py.
    assert {name for name, languages in held.items() if languages} == {
        "README.md",
        "docs/python.md",
        "docs/rewards.md",
        "toyworld/README.md",
    }
    assert set.union(*held.values()) == {"python"}


def test_python_s_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("\n".join(blocks("docs/python.md")), "docs/python.md")
    assert len(flowcredit.read_run("runs/python").iterations) == 3
    assert (names["base"].name, names["adapter"].iteration) == ("base", 2)


def test_the_scorer_of_the_rewards_page_scores() -> None:
    (code,) = blocks("docs/rewards.md")
    scorer = run(code, "docs/rewards.md")["Brightness"](gain=2)
    images = np.stack([np.full((4, 4, 3), level, np.uint8) for level in (0, 51, 255)])
    scorer.check([])
    scores = scorer.score(images, ["a"] * 3, [{}] * 3)
    assert scores.values.tolist() == pytest.approx([0.0, 0.4, 1.0])
    assert scores.valid.all()


def test_the_snippet_of_the_toy_world_s_page_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("toyworld/README.md")
    (tmp_path / "toyworld").symlink_to(ROOT / "toyworld")
    monkeypatch.chdir(tmp_path)
    run(code, "toyworld/README.md")
    assert (tmp_path / "circle.png").stat().st_size > 0


def test_the_yaml_of_the_rewards_page_is_a_config() -> None:
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    sections = [
        (match[1], yaml.safe_load(re.sub(r"^    ", "", match[0], flags=re.M))) for match in SECTION.finditer(text)
    ]
    assert len(sections) >= 5
    for name, tree in sections:
        tree = {"rewards": tree} if name == "geneval" else tree
        if "rewards" in tree:
            tree["evaluation"] = {"component": "reward"}
        load_config("toy_geneval", overrides=tree)
