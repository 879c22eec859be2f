"""What the tests of the board share."""

from collections.abc import Iterator

import pytest

from tests.support.boards import KINDS, board_of


@pytest.fixture(scope="module", params=KINDS)
def board_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A board of each kind."""
    with board_of(request.param, tmp_path_factory.mktemp("board")) as url:
        yield url
