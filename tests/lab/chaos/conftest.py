"""What the chaos tests share: the run that nothing happens to, and a disk of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.faults.disks import NoRightToMountError, small_disk
from tests.support.runs.scene import Driver, Story, preset, story


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Story:
    """Its story, from a run in one process; a test's own preset may differ only in what changes no result."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Driver(preset(folder, tiny_sd3), folder / "run", "--local").finish()
    return story(folder / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk that can be filled or made read-only."""
    try:
        with small_disk(tmp_path / "disk") as disk:
            yield disk
    except NoRightToMountError as error:
        pytest.skip(f"no right to mount a small disk: {error}")
