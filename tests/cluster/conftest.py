"""One Ray cluster of three machines and a laptop for all scenes; each scene leaves it whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.cluster import Cluster
from tests.support.faults.lab import laboratory
from tests.support.programs import need
from tests.support.runs.scene import Story


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Head, two nodes, laptop."""
    need("redis-server")
    folder: Path = tmp_path_factory.mktemp("lab")
    with laboratory(folder / "lab", machines=4) as lab:
        cluster = Cluster(lab)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> Story:
    """The story of the run that nothing happens to."""
    return cluster.undisturbed()
