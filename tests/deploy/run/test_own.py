"""A whole run with the reward, the credit rule and the objective of docs/own.md, from a file of the user's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from actors.fleet import RayFleet
from deploy.monitor.progress import Progress
from deploy.run.run import run_training
from learner.update.own import PolicyStep, own_loss
from protocol.errors import ConfigError, RunFolderError
from protocol.ground.import_path import file_digests, find_function
from tests.support.paths import ROOT
from tests.support.runs.watched import go
from tests.support.scenes import long_scene
from tests.support.services.local_ray import local_ray

OWN = {"credit": {"rule": "./mine.py:late"}, "learner": {"objective": "./mine.py:loss"}}


@pytest.fixture
def config(tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config in a folder with the page's code."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
    Path("mine.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    Path("prompts.txt").write_text("a\n")
    return tiny_config(
        iterations=1,
        data={"train": "prompts.txt", "heldout": "prompts.txt"},
        **OWN,
        rewards={"red": {"scorer": "./mine.py:redness", "args": {"gain": 2}}},
        evaluation={"images_per_prompt": 1, "component": "reward"},
        status={"board": "off", "trajectories": 0},
    )


def metrics_of(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "train/loss" in line]
    shown = ("train/", "step_reward/", "reward/mean")
    return {name: value for name, value in trained.items() if name.startswith(shown)}


def test_a_run_earns_and_learns_what_the_functions_of_the_page_say(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_training(config, folder=tmp_path / "run", is_local=True, progress=Progress(Console()))
    assert "reward = 1.0 red" in capsys.readouterr().out
    trained = metrics_of(tmp_path / "run")
    gains = [trained[f"step_reward/step_{k}_abs_mean"] for k in range(3)]
    assert gains[:2] == [0.0, 0.0]
    assert gains[2] > 0
    (digest,) = set(file_digests({"": "./mine.py:late"}).values())
    held = json.loads((tmp_path / "run" / "inputs.json").read_text())
    assert [held[key] for key in ("credit.rule", "learner.objective", "rewards.red.scorer")] == [digest] * 3

    Path("mine.py").write_text(Path("mine.py").read_text() + "# another digest\n")
    with pytest.raises(RunFolderError, match=r"credit.rule \(there .* now"):
        run_training(config, folder=tmp_path / "run", is_local=True, progress=Progress(Console()))
    Path("mine.py").unlink()
    Path("other.py").write_text("def late(rewards): return rewards\n")
    wrong = config.model_copy(update={"credit": config.credit.model_copy(update={"rule": "./other.py:late"})})
    with pytest.raises(ConfigError, match=r"credit.rule ./other.py:late must return step rewards \[3, 3\]"):
        run_training(wrong, folder=tmp_path / "none", is_local=True, progress=Progress(Console()))
    assert not (tmp_path / "none").exists()


def test_the_worked_numbers_of_the_page(config: Any) -> None:
    nan = torch.nan
    assert find_function("./mine.py:late")(torch.tensor([[nan, nan, 0.3]])).tolist() == [[0, pytest.approx(0.3)]]
    log_ratio = torch.zeros(1, requires_grad=True)
    blank = torch.zeros(1, 1, 1, 1)
    step = PolicyStep(k=0, step_size=0.1, mean=blank, std=blank[:, 0, 0, 0], next_latents=blank, config=config.learner)
    loss = own_loss(config.learner.objective, log_ratio, torch.tensor([2.0]), step)
    loss.sum().backward()
    assert (loss.item(), log_ratio.grad) == (-2, torch.tensor([-2.0]))


@long_scene
@pytest.mark.ray
@pytest.mark.whole
def test_on_ray_the_functions_give_the_same_bits(config: Any, tmp_path: Path) -> None:
    alone = go(config, tmp_path / "alone")
    with local_ray(4):
        assert go(config, tmp_path / "ray", make_fleet=RayFleet) == alone
