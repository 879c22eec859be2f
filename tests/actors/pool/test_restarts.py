"""How often a part may be replaced, and how long each replacement waits."""

import pytest

from actors.pool.restarts import RestartBudget
from protocol.errors import PoolError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_to_a_bound_and_the_limit_ends_it():
    budget = RestartBudget("pool x", limit=9, within_s=60, clock=Clock())
    assert [budget.spend("killed") for _ in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    with pytest.raises(PoolError, match="pool x used up its 9 restarts within 60 s; last failure: hung"):
        budget.spend("hung")


def test_a_loss_that_is_older_than_the_window_no_longer_counts():
    clock = Clock()
    budget = RestartBudget("pool x", limit=1, within_s=60, clock=clock)
    for _ in range(5):
        assert budget.spend("killed") == 0.0
        clock.now += 1
        budget.succeed()
        clock.now += 60
    assert budget.total == 5
    budget.spend("killed")
    clock.now += 60
    with pytest.raises(PoolError):
        budget.spend("killed")


def test_a_part_that_never_succeeds_ends_also_if_each_try_outlasts_the_window():
    clock = Clock()
    budget = RestartBudget("pool x", limit=3, within_s=60, clock=clock)
    for _ in range(3):
        budget.spend("no node had room for it within 600 s")
        clock.now += 600
    with pytest.raises(PoolError, match="pool x used up its 3 restarts without a success; last failure: no node had"):
        budget.spend("no node had room for it within 600 s")


def test_without_restarts_the_first_loss_ends_it():
    with pytest.raises(PoolError, match="used up its 0 restarts"):
        RestartBudget("pool x", limit=0, within_s=60).spend("killed")
