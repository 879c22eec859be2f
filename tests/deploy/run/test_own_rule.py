"""A whole run with the credit rule of docs/method/credit.md, from a file of the user's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.monitor.progress import Progress
from deploy.run.run import run_training
from protocol.errors import ConfigError
from tests.support.paths import ROOT


def test_a_run_earns_what_the_rule_in_its_file_says(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "method" / "credit.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    Path("mine.py").write_text(code)
    Path("prompts.txt").write_text("a\n")
    config = tiny_config(
        iterations=1,
        data={"train": "prompts.txt", "heldout": "prompts.txt"},
        credit={"rule": "./mine.py:late"},
        rewards={"dark": {"scorer": "tests.support.rewards.dark:Dark"}},
        evaluation={"images_per_prompt": 1, "component": "reward"},
        status={"board": "off", "trajectories": 0},
    )
    run_training(config, folder=tmp_path / "run", is_local=True, progress=Progress(Console()))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "train/loss" in line]
    gains = [trained[f"step_reward/step_{k}_abs_mean"] for k in range(3)]
    assert gains[:2] == [0.0, 0.0]
    assert gains[2] == pytest.approx(abs(trained["reward/mean"]), rel=1e-5)

    Path("other.py").write_text("def late(rewards): return rewards\n")
    wrong = config.model_copy(update={"credit": config.credit.model_copy(update={"rule": "./other.py:late"})})
    with pytest.raises(ConfigError, match=r"credit.rule ./other.py:late must return step rewards \[3, 3\]"):
        run_training(wrong, folder=tmp_path / "none", is_local=True, progress=Progress(Console()))
    assert not (tmp_path / "none").exists()
