"""The run that nothing happens to, once for all chaos tests."""

from pathlib import Path

import pytest

from tests.chaos.scene import Driver, Story, preset, story


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Story:
    """Its story, from a run in one process; a test's own preset may differ only in what changes no result."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Driver(preset(folder, tiny_sd3), folder / "run", "--local").finish()
    return story(folder / "run")
