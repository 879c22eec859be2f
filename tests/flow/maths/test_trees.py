"""Where branches split, and how many members share a step before."""

import pytest

from flow.maths.trees import splits_of, strides_of
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("shares", "explored", "splits", "strides"),
    [
        ((), (0, 1, 2), (), {}),
        ((0.0, 0.15, 0.3, 0.45), tuple(range(19)), (0, 3, 6, 9), {0: 8, 1: 8, 3: 4, 5: 4, 6: 2, 9: 1, 18: 1}),
        ((0.6,), (2, 3, 4), (4,), {2: 2, 3: 2, 4: 1}),
        ((0.3, 0.6), (1, 2, 5), (2, 5), {1: 4, 2: 2, 5: 1}),
        ((0.3,), tuple(range(10)), (3,), {0: 2, 2: 2, 3: 1}),
    ],
)
def test_splits_are_shares_of_the_steps_that_have_noise(
    shares: tuple[float, ...], explored: tuple[int, ...], splits: tuple[int, ...], strides: dict[int, int]
) -> None:
    assert splits_of(shares, explored) == splits
    found = strides_of(shares, explored)
    assert {k: found[k] for k in strides} == strides
    assert found.keys() == (set(explored) if splits else set())


@pytest.mark.parametrize(("shares", "explored"), [((0.9,), (0, 1)), ((0.3, 0.5), (0, 1)), ((0.6,), (3,))])
def test_shares_that_name_no_different_steps_are_refused(shares: tuple[float, ...], explored: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must name different ones of the . stochastic steps .*: take other shares"):
        splits_of(shares, explored)
