"""Windows: which steps of which iteration and shard are stochastic, and which windows are refused."""

from typing import Any

import pytest

from deploy.presets import load_config
from flow.maths.windows import (
    require_trainable,
    splits_of,
    strides_of,
    window_lengths,
    window_steps,
    window_union,
)
from protocol.config.sampling import WindowConfig
from protocol.errors import ConfigError

CANDIDATES, TOTAL = tuple(range(9)), 10


def steps(iteration: int = 0, shard: int = 0, seed: int = 0, group: int = 0, **window: Any) -> tuple[int, ...]:
    where = {"seed": seed, "iteration": iteration, "group": group, "shard": shard}
    return window_steps(WindowConfig(**window), candidates=CANDIDATES, total=TOTAL, **where)


def test_all_and_fixed_windows_never_move() -> None:
    for iteration in (0, 7, 1000):
        assert steps(iteration, rule="all") == CANDIDATES
        assert steps(iteration, rule="fixed", first=3, size=2) == (3, 4)


def test_a_fixed_window_drops_steps_that_cannot_be_stochastic() -> None:
    assert steps(rule="fixed", first=8, size=2) == (8,)


def test_a_random_window_is_the_same_for_all_shards_of_an_iteration_and_reaches_every_position() -> None:
    def drawn(iteration: int, shard: int) -> tuple[int, ...]:
        return steps(iteration, shard, rule="random", size=2, within=(0.0, 0.5))

    indices = [drawn(iteration, 0) for iteration in range(200)]
    assert indices == [drawn(iteration, 5) for iteration in range(200)]
    assert set(indices) == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert min(indices.count(index) for index in set(indices)) > 25, "each of four indices about 50 times"


def test_a_random_window_is_a_fixed_function_of_seed_and_iteration() -> None:
    """Pinned: another draw would make a resumed run, or one of another release, train other steps."""
    assert [steps(i, rule="random", size=2, within=(0.0, 0.5))[0] for i in range(8)] == [3, 2, 2, 3, 2, 2, 3, 1]


def test_another_seed_draws_other_windows() -> None:
    first, second = ([steps(i, seed=seed, rule="random", size=2) for i in range(20)] for seed in (0, 1))
    assert first != second


def test_a_sliding_window_moves_by_one_every_so_many_iterations_and_rolls_back() -> None:
    indices = [steps(i, rule="sliding", size=4, every=25)[0] for i in range(0, 25 * 9, 25)]
    assert indices == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert steps(24, rule="sliding", size=4, every=25) == (0, 1, 2, 3)
    assert steps(25 * 6, rule="sliding", size=4, every=25) == (6, 7, 8), "never empty at the end of the schedule"


def test_a_shrinking_window_slides_as_in_mixgrpos_release() -> None:
    """T = 25: the release's steps are range(p, min(p + 4, T - 2)) at position p; the empty one at T - 2 is left out."""
    window = load_config("sd35_pickscore", overrides=["method=mix_grpo"]).sampling.window.model_dump()
    positions = [
        window_steps(WindowConfig(**window), candidates=range(24), total=25, seed=0, iteration=25 * p, shard=0)
        for p in range(24)
    ]
    assert positions == [tuple(range(p % 23, min(p % 23 + 4, 23))) for p in range(24)]
    assert positions[19:] == [(19, 20, 21, 22), (20, 21, 22), (21, 22), (22,), (0, 1, 2, 3)]


def test_only_a_sliding_window_shrinks() -> None:
    for rule in ("random", "fixed"):
        assert steps(3, rule=rule, size=4, shrinks=True) == steps(3, rule=rule, size=4)


def test_a_spread_window_moves_by_one_from_group_to_group_and_from_iteration_to_iteration() -> None:
    def spread(iteration: int, group: int, size: int = 2) -> tuple[int, ...]:
        return steps(iteration, 3, group=group, rule="spread", size=size, within=(0.0, 0.5))

    assert [spread(0, group) for group in range(5)] == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 1)]
    assert [spread(iteration, 2) for iteration in range(3)] == [(2, 3), (3, 4), (0, 1)]
    assert [spread(0, group, size=5) for group in range(2)] == [(0, 1, 2, 3, 4)] * 2


def test_a_spread_window_always_holds_as_many_eligible_steps() -> None:
    window = WindowConfig(rule="spread", size=2)
    found = [
        window_steps(window, candidates=(0, 1, 3), total=4, seed=0, iteration=0, group=group) for group in range(3)
    ]
    assert found == [(0, 1), (1, 3), (0, 1)]
    assert window_lengths(window, candidates=(0, 1, 3), total=4) == {2}
    with pytest.raises(ConfigError, match=r"must hold 4 of the stochastic steps \[0, 1, 3\], got \[0, 1, 3\]"):
        require_trainable(WindowConfig(rule="spread", size=4), candidates=(0, 1, 3), total=5)


def test_the_part_that_holds_the_windows_is_that_of_exact_arithmetic() -> None:
    """0.14 of 50 is 7 and 0.58 of 50 is 29; their floating-point products are a little more and a little less."""
    assert WindowConfig(within=(0.14, 0.58)).bounds(50) == (7, 29)


def test_branches_explore_one_step_a_shard_and_all_steps_over_the_iterations() -> None:
    assert [steps(0, shard, rule="branch") for shard in range(9)] == [(k,) for k in range(9)]
    assert {steps(iteration, 0, rule="branch")[0] for iteration in range(9)} == set(CANDIDATES)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"rule": "fixed", "first": 9, "size": 1}, "always hold a stochastic step, one of .*, got steps 9 to 9"),
        ({"rule": "random", "size": 1}, "got steps 9 to 9"),
        ({"rule": "sliding", "size": 1, "within": (0.9, 1.0)}, "got steps 9 to 9"),
        ({"rule": "sliding", "size": 4, "shrinks": True}, "got steps 9 to 9"),
    ],
)
def test_a_window_that_may_hold_no_stochastic_step_is_refused(window: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_trainable(WindowConfig(**window), candidates=CANDIDATES, total=TOTAL)


@pytest.mark.parametrize("window", [{"rule": "all"}, {"rule": "branch"}, {"rule": "fixed", "first": 8, "size": 2}])
def test_other_windows_are_taken(window: dict[str, Any]) -> None:
    require_trainable(WindowConfig(**window), candidates=CANDIDATES, total=TOTAL)


@pytest.mark.parametrize(
    ("window", "lengths"),
    [
        ({"rule": "all"}, {9}),
        ({"rule": "fixed", "first": 8, "size": 2}, {1}),
        ({"rule": "random", "size": 3, "within": (0.0, 0.5)}, {3}),
        ({"rule": "random", "size": 3}, {2, 3}),
        ({"rule": "random", "size": 1, "within": (0.0, 0.5)}, {1}),
        ({"rule": "sliding", "size": 4}, {3, 4}),
        ({"rule": "branch", "within": (0.0, 0.5)}, {1}),
        ({"rule": "spread", "size": 2, "within": (0.3, 1.0)}, {2}),
    ],
)
def test_the_lengths_and_steps_of_windows_are_those_of_some_iteration(
    window: dict[str, Any], lengths: set[int]
) -> None:
    assert window_lengths(WindowConfig(**window), candidates=CANDIDATES, total=10) == lengths
    seen = [steps(iteration, **window) for iteration in range(300)]
    assert set(map(len, seen)) == lengths
    assert window_union(WindowConfig(**window), candidates=CANDIDATES, total=10) == tuple(sorted(set().union(*seen)))


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


@pytest.mark.parametrize(("shares", "explored"), [((0.9,), (0, 1)), ((0.3, 0.5), (0, 1)), ((0.6,), (3,)), ((0.6,), ())])
def test_shares_that_name_no_different_steps_are_refused(shares: tuple[float, ...], explored: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must name different ones of the . stochastic steps .*: take other shares"):
        splits_of(shares, explored)
