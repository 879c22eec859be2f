"""A run on two nodes to which everything happens that can, by a seeded plan, ends like the run that is left alone."""

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.scene import ROOT, Driver, TwoNodes, events, preset, require_undisturbed, story, two_nodes

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(600)]
FAULTS: dict[str, Callable[[TwoNodes], object]] = {
    **{f"kill {kind}": lambda nodes, kind=kind: nodes.harm(kind, signal.SIGKILL) for kind in ("rollout", "reward")},
    **{f"stop {kind}": lambda nodes, kind=kind: nodes.harm(kind, signal.SIGSTOP) for kind in ("rollout", "reward")},
    "kill learner": lambda nodes: nodes.harm("learner", signal.SIGKILL),
    "stop learner": lambda nodes: nodes.harm("learner", signal.SIGSTOP),
    "kill raylet": lambda nodes: nodes.kill_worker_raylet(),
}


def plan(seed: int) -> list[tuple[int, str]]:
    """When which fault comes: each once, the driver's death among them, at iterations drawn by the seed."""
    numbers = random.Random(seed)
    names = [*FAULTS, "kill driver"]
    numbers.shuffle(names)
    moments = sorted(numbers.sample(range(1, 18), len(names)))
    return list(zip(moments, names, strict=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_sd3):
    """The preset, and the story of a run in one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = preset(folder, tiny_sd3)
    Driver(path, folder / "run", "--local").finish()
    return path, story(folder / "run")


def disturbed(path: Path, run: Path, seed: int) -> list[str]:
    """Run under a plan of faults; what was done."""
    done = []
    with two_nodes() as nodes:
        words = (f"cluster.address={nodes.address}",)
        driver = Driver(path, run, *words)
        try:
            for moment, name in plan(seed):
                driver.wait_for_iteration(moment)
                done.append(name)
                if name == "kill driver":
                    driver.kill()
                    driver = Driver(path, run, *words)
                else:
                    FAULTS[name](nodes)
            driver.finish()
        finally:
            driver.kill()
    return done


def test_every_fault_in_one_run_changes_nothing(undisturbed, tmp_path):
    path, expected = undisturbed
    done = disturbed(path, tmp_path / "run", seed=0)
    assert sorted(done) == sorted([*FAULTS, "kill driver"])
    require_undisturbed(tmp_path / "run", expected)
    kinds = [event["type"] for event in events(tmp_path / "run")]
    assert kinds.count("learner_lost") >= 2
    assert kinds.count("actor_lost") >= 4


def test_sigterm_stops_with_a_checkpoint_and_exit_code_0_and_a_second_driver_is_kept_out(undisturbed, tmp_path):
    path, expected = undisturbed
    run = tmp_path / "run"
    driver = Driver(path, run)
    driver.wait_for_iteration(3)
    command = [sys.executable, "-m", "deploy", "train", str(path), "--run", str(run), "--local"]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 2
    assert "is in use by another process" in second.stderr
    driver.process.send_signal(signal.SIGTERM)
    said = driver.finish(timeout_s=60)
    assert "stopping with a checkpoint" in said
    assert "the same command goes on" in said
    Driver(path, run, "--local").finish()
    require_undisturbed(run, expected)
