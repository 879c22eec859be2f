"""A disk that fills up in the middle of a run: older checkpoints stay, the run goes on, says so, and heals."""

import shutil

import pytest

from tests.lab.faults.disks import fill
from tests.support.runs.scene import Driver, events, preset, require_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_full_disk_keeps_the_run_alive_and_the_older_checkpoint(undisturbed, disk, tmp_path, tiny_sd3):
    path = preset(tmp_path, tiny_sd3, checkpoint={"every": 4, "keep": 2})
    run = disk / "run"
    driver = Driver(path, run, "--local")
    driver.wait_for_iteration(5)
    with driver.held():
        filler = fill(disk)
    line = driver.wait_for(lambda line: "cannot be written: No space left on device" in line)
    assert str(run) in line
    driver.wait_for_iteration(13)
    with driver.held():
        held = sorted(each.name for each in (run / "checkpoints").glob("iteration_*"))
        assert held
        assert held[-1] < "iteration_000012", "the one that was due meanwhile is missing"
        filler.unlink()
    driver.finish()
    require_undisturbed(run, undisturbed)
    assert shutil.disk_usage(disk).free > 0
    healed = [event for event in events(run) if event["type"] in ("CheckpointsWritten", "MetricsWritten")]
    assert healed[-1]["holds"] is True
