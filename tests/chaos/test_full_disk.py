"""A disk that fills up in the middle of a run: older checkpoints stay, the run goes on, says so, and heals."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.scene import Driver, events, preset, require_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Take every free byte."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_a_full_disk_keeps_the_run_alive_and_the_older_checkpoint(undisturbed, small_disk, tmp_path, tiny_sd3):
    path = preset(tmp_path, tiny_sd3, checkpoint={"every": 4, "keep": 2})
    run = small_disk / "run"
    driver = Driver(path, run, "--local")
    driver.wait_for_iteration(5)
    fill(small_disk)
    line = driver.wait_for(lambda line: "cannot be written: No space left on device" in line)
    assert str(run) in line
    driver.wait_for_iteration(14)
    held = sorted(each.name for each in (run / "checkpoints").glob("step_*"))
    assert held
    assert held[-1] < "step_000014"
    (small_disk / "filler").unlink()
    driver.finish()
    require_undisturbed(run, undisturbed)
    assert shutil.disk_usage(small_disk).free > 0
    healed = [event for event in events(run) if event["type"] in ("CheckpointsWritten", "MetricsWritten")]
    assert healed[-1]["holds"] is True
