"""How many steps a share is, by hand."""

import pytest

from flow.maths.hybrid import first_steps
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("share", "steps", "first"),
    [
        (0.6, 50, 30),  # the script of MixGRPO's release
        (0.67, 6, 4),
        (2 / 3, 3, 2),
        (0.5, 5, 3),
        (0.7, 45, 32),
        (0.49, 5, 2),
        (0.95, 8, 8),
        (0.01, 8, 1),
        (1.0, 1, 1),
        (1.0, 28, 28),
    ],
)
def test_a_share_is_the_nearest_number_of_steps_and_one_at_least(share: float, steps: int, first: int) -> None:
    assert first_steps(share, steps) == first


@pytest.mark.parametrize(("share", "shown"), [(0.0, "0"), (-0.5, "-0.5"), (1.01, "1.01"), (float("nan"), "nan")])
def test_a_share_outside_is_refused(share: float, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"above 0 and at most 1, got {shown}"):
        first_steps(share, 8)
