"""The scorers of docs/rewards.md and the README work as they stand there; the page names every built-in one."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rewards.scorer import SCORERS, build_scorer, check_prompts
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_twenty_line_scorer_of_the_page_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "page_scorer.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    check_prompts("page_scorer:Brightness", {"gain": 2}, [])
    scorer = build_scorer("page_scorer:Brightness", gain=2)
    images = np.stack([np.full((4, 4, 3), level, np.uint8) for level in (0, 51, 255)])
    np.testing.assert_allclose(scorer.score(images, ["", "", ""], [{}] * 3).values, [0, 0.4, 1], rtol=1e-6)
    sys.modules.pop("page_scorer")


def test_the_function_of_the_readme_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) == 3
    check_prompts("./mine.py:redness", {}, [])
    images = np.stack([np.full((4, 4, 3), colour, np.uint8) for colour in ((255, 0, 0), (51, 51, 51), (0, 0, 255))])
    scores = build_scorer("./mine.py:redness").score(images, ["", "", ""], [{}] * 3)
    np.testing.assert_allclose(scores.values, [1, 0, -0.5], atol=1e-6)


def test_every_built_in_scorer_stands_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows[: len(SCORERS)] and set(SCORERS) <= set(rows)


def test_every_key_of_a_reward_is_named() -> None:
    from protocol.config.reward import RewardConfig

    assert [
        name
        for name in RewardConfig.model_fields
        if not re.search(rf"`[^`]*\b{name}\b|^ +\S+: {{.*\b{name}\b", PAGE, re.MULTILINE)
    ] == []
