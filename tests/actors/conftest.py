"""Most tests of actors share one Ray cluster: its start takes longer than they do."""

import pytest

from tests.support.services.local_ray import share_ray


@pytest.fixture
def shared_ray() -> None:
    """This process is connected to a cluster of four CPU cores; conftest.py ends it before a test that does not ask."""
    share_ray()
