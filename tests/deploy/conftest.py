"""What the tests of the board and its server share."""

from collections.abc import Iterator

import pytest

from tests.support.services.boards import KINDS, board_of
from tests.support.services.serving import Serve, servers


@pytest.fixture(scope="module", params=KINDS)
def board_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A board of each kind."""
    with board_of(request.param, tmp_path_factory.mktemp("board")) as url:
        yield url


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start servers that end with the test module."""
    with servers() as start:
        yield start
