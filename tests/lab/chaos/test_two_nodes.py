"""A run on two nodes to which everything happens that can, by a seeded plan, ends like the run that is left alone."""

import signal
import subprocess
import sys

import pytest

from tests.lab.faults.plans import FAULTS, disturbed
from tests.lab.faults.two_nodes import two_nodes
from tests.support.paths import ROOT
from tests.support.runs.scene import Driver, events, preset, require_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(600)]


def test_every_fault_in_one_run_changes_nothing(undisturbed, tmp_path, tiny_sd3):
    path = preset(tmp_path, tiny_sd3)
    done = disturbed(path, tmp_path / "run", seed=0, names=FAULTS)
    assert sorted(done) == sorted(FAULTS)
    require_undisturbed(tmp_path / "run", undisturbed)
    kinds = [event["type"] for event in events(tmp_path / "run")]
    assert kinds.count("learner_failed") >= 2
    assert kinds.count("actor_failed") >= 3


def test_sigterm_stops_with_a_checkpoint_and_exit_code_0_and_the_same_command_continues(
    undisturbed, tmp_path, tiny_sd3
):
    path = preset(tmp_path, tiny_sd3)
    run = tmp_path / "run"
    driver = Driver(path, run)
    driver.wait_for_iteration(3)
    driver.process.send_signal(signal.SIGTERM)
    said = driver.finish()
    assert "stopping with a checkpoint" in said
    assert "the same command continues" in said
    Driver(path, run, "--local").finish()
    require_undisturbed(run, undisturbed)


def test_a_second_driver_is_kept_out(undisturbed, tmp_path, tiny_sd3):
    path = preset(tmp_path, tiny_sd3)
    run = tmp_path / "run"
    driver = Driver(path, run, "--local")
    driver.wait_for_iteration(3)
    with driver.held():
        command = [sys.executable, "-m", "flowcredit", "train", str(path), "--run", str(run), "--local"]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 2
    assert "is in use by another process" in second.stderr
    driver.finish()
    require_undisturbed(run, undisturbed)


def test_what_went_down_with_a_node_is_told_as_lost_and_not_as_a_dead_actor():
    import asyncio

    import numpy as np
    import ray

    from actors.pool.calls import answer
    from actors.pool.nodes import NODE_LABEL
    from protocol.errors import ShardLostError

    class Artist:
        def draw(self) -> np.ndarray:
            return np.ones((64, 64, 64))

        def look(self, image: np.ndarray) -> float:
            return float(image.sum())

    with two_nodes() as nodes:
        ray.init(address=nodes.address, log_to_driver=False)
        try:
            there = nodes.worker.node_id
            make = ray.remote(Artist).options
            painter = make(label_selector={NODE_LABEL: there}, num_cpus=0).remote()
            critic = make(label_selector={NODE_LABEL: f"!{there}"}, num_cpus=0).remote()
            image = painter.draw.remote()
            ray.wait([image], timeout=60, fetch_local=False)
            assert asyncio.run(answer(critic.look.remote(np.ones(3)), timeout_s=60)) == 3.0
            nodes.harm_worker_raylet(signal.SIGKILL)
            with pytest.raises(ShardLostError):
                asyncio.run(answer(critic.look.remote(image), timeout_s=120))
            with pytest.raises(ShardLostError):
                asyncio.run(answer(image, timeout_s=120))
        finally:
            ray.shutdown()
