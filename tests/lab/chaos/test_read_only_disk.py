"""Disks that cannot be written: at the start one clear line, in the middle of a run a condition that heals."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lab.faults.disks import fill, read_only
from tests.support.commands import Cli
from tests.support.runs.scene import Driver, events, preset, require_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


Refused = Callable[[Path], str]


@pytest.fixture
def refused(tmp_path: Path, tiny_sd3: Path, cli: Cli) -> Refused:
    """The one line of a run that does not begin in this folder."""
    path = preset(tmp_path, tiny_sd3)

    return lambda run: cli.refused("train", str(path), "--run", str(run), "--local")


def test_a_run_on_a_read_only_disk_does_not_begin(disk, refused):
    line = f"flowcredit: run folder {disk / 'run'} cannot be written: Read-only file system; fix that or set --run"
    with read_only(disk):
        assert refused(disk / "run") == line
    assert list(disk.iterdir()) == []
    (disk / "run").mkdir()
    with read_only(disk):
        assert refused(disk / "run") == line


def test_a_run_on_a_full_disk_does_not_begin_and_leaves_nothing(disk, refused):
    filler = fill(disk)
    assert "cannot be written: No space left on device" in refused(disk / "run")
    assert list(disk.iterdir()) == [filler]


def test_a_disk_that_becomes_read_only_keeps_the_run_alive_and_heals(undisturbed, disk, tmp_path, tiny_sd3):
    path = preset(tmp_path, tiny_sd3)
    run = disk / "run"
    driver = Driver(path, run, "--local")
    driver.wait_for_iteration(5)
    with ExitStack() as still, read_only(run):
        line = driver.wait_for(lambda line: "cannot be written: Read-only file system" in line)
        assert str(run) in line
        held = sorted(each.name for each in (run / "checkpoints").glob("iteration_*"))
        driver.wait_for_iteration(10)
        still.enter_context(driver.held())
        assert driver.process.poll() is None
        assert sorted(each.name for each in (run / "checkpoints").glob("iteration_*")) == held
    driver.finish()
    require_undisturbed(run, undisturbed)
    healed = {event["type"]: event["holds"] for event in events(run) if "holds" in event}
    assert healed["MetricsWritten"] is True
    assert healed["CheckpointsWritten"] is True
