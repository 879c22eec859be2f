"""One Ray cluster of three machines and a laptop for all scenes; each scene leaves it whole."""

from collections.abc import Iterator

import pytest

from tests.lab.faults.cluster import Cluster
from tests.lab.faults.lab import laboratory
from tests.support.programs import need
from tests.support.runs.scene import Story


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Head, two nodes, laptop; nothing runs on them yet."""
    need("redis-server")
    need("gcc")
    with laboratory(tmp_path_factory.mktemp("lab") / "lab", machines=4) as lab:
        yield Cluster(lab)


@pytest.fixture(scope="session")
def cluster(machines: Cluster) -> Iterator[Cluster]:
    """Ray and the board run on them."""
    try:
        machines.start()
        yield machines
    finally:
        machines.stop()


@pytest.fixture(scope="session")
def undisturbed(machines: Cluster) -> Story:
    """The story of the run that nothing happens to."""
    return machines.undisturbed()
