"""A whole run that is hacked: the guard ends it, and what its message says about the better checkpoint can be done."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.folder.read import lines_of
from learner.checkpoint import read_checkpoint
from protocol.ground.files import ADAPTER_FILE, by_iteration, iteration_name
from tests.support.runs.scene import Driver
from tests.support.scenes import long_scene

pytestmark = pytest.mark.whole
HACKED = [
    "iterations=12",
    "method=flow_grpo_fast",
    "learner.learning_rate=0.01",
    "group.size=8",
    "group.shard=8",
    "group.per_iteration=2",
    "data.tags=[colors]",
    "rewards={geneval: null, red: {scorer: 'benchmarks.scorers:Redness'},"
    " mild: {scorer: 'tests.support.rewards.judges:Mild', use: evaluate, args: {at: 0.06}}}",
    "evaluation={every: 1, images_per_prompt: 2, steps: 2, component: red}",
    "checkpoint={every: 100, keep: 1}",
    "guards.hacking=stop",
    "cluster.learner.threads=1",
]


def train(folder: Path, *words: str) -> Driver:
    return Driver(Path("toy_geneval"), folder, *HACKED, *words)


def stopped(driver: Driver) -> str:
    """What a run says that the guard ends."""
    assert driver.process.wait(300) == 1, driver.text
    return driver.text.replace("\n", " ")


def means_of(run: Path) -> dict[int, float]:
    return {line["iteration"]: line["evaluation/reward/mild"] for line in lines_of(run) if "evaluation/score" in line}


def sha(run: Path, iteration: int) -> str:
    return hashlib.sha256((run / "checkpoints" / iteration_name(iteration) / ADAPTER_FILE).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("hacked") / "run"
    return run, stopped(train(run, "--local"))


def test_the_guard_stops_the_run_at_its_best_checkpoint(hacked):
    run, said = hacked
    means = means_of(run)
    peak, last = max(means, key=lambda iteration: means[iteration]), max(means)
    assert 0 < peak == last - 2, "it ends after two evaluations in a row, long before iteration 12"
    assert list(by_iteration(run / "checkpoints")) == [peak]
    folder = run / "checkpoints" / iteration_name(peak)
    assert f"the better checkpoint is kept: {folder}; " in said
    state = read_checkpoint(folder)
    assert any(np.abs(array).max() > 0 for name, array in state.adapter.arrays.items() if "lora_B" in name)

    words = ["generate", str(run), "a red circle", "--iteration", str(peak), "--out", str(run.parent / "images")]
    answer = CliRunner().invoke(app, [*words, "--count", "1", "--device", "cpu"])
    assert answer.exit_code == 0, answer.output
    assert len(list((run.parent / "images").glob("*.png"))) == 1


def test_a_new_run_goes_on_from_that_checkpoint(hacked, tmp_path):
    run, _ = hacked
    peak = max(by_iteration(run / "checkpoints"))
    start = f"model.lora.start={run / 'checkpoints' / iteration_name(peak)}"
    train(tmp_path / "run", "--local", "iterations=1", start).finish()
    assert means_of(tmp_path / "run")[0] == pytest.approx(means_of(run)[peak], abs=1e-6)


@long_scene
@pytest.mark.ray
def test_a_run_with_two_actors_that_is_killed_keeps_the_same_checkpoint(hacked, tmp_path):
    run, actors = tmp_path / "run", ("cluster.rollout_actors=2", "rewards.mild.actors=2", "checkpoint.every=3")
    driver = train(run, *actors)
    driver.wait_for(lambda line: line.startswith("held-out score at iteration 3"))
    driver.kill()
    said = stopped(train(run, *actors))
    peak = max(by_iteration(hacked[0] / "checkpoints"))
    assert f"the better checkpoint is kept: {run / 'checkpoints' / iteration_name(peak)}; " in said
    assert means_of(run) == means_of(hacked[0])
    assert sha(run, peak) == sha(hacked[0], peak)
