"""Prompts by the spread of their rewards: a first pass in turn, then those whose members differ."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import learner.loop.groups
from benchmarks.race.allocation import Allocation, allocated
from learner.loop.groups import prompt_at
from protocol.messages import Prompt, Scores

PROMPTS = [Prompt(index=index, text=f"prompt {index}", metadata={}) for index in range(10)]


def a_shard(rewards: list[float]) -> Any:
    """Three members with two points each; only the last column of `image_index` is the finished image."""
    values = np.array([9.0, 9.0, 9.0, *rewards], np.float32)
    scores = Scores(values=values, valid=np.isfinite(values), reasons=("",) * len(values))
    return SimpleNamespace(scores=scores, facts=SimpleNamespace(image_index=np.array([[0, 3], [1, 4], [2, 5]])))


def an_iteration(allocation: Allocation, iteration: int) -> list[int]:
    first = iteration * allocation.per_iteration
    return [allocation.prompt_at(PROMPTS, first + group, seed=7).index for group in range(allocation.per_iteration)]


def test_the_first_pass_is_that_of_every_run() -> None:
    allocation = Allocation(4)
    expected = [prompt_at(PROMPTS, index, seed=7).index for index in range(10)]
    assert [*an_iteration(allocation, 0), *an_iteration(allocation, 1)] == expected[:8]
    for index in expected[:8]:
        allocation.drop_if_void(PROMPTS[index], [a_shard([0.0, 1.0, 1.0])])
    third = an_iteration(allocation, 2)
    assert third[:2] == expected[8:]
    assert len(set(third)) == 4, "no prompt twice in an iteration"


def test_prompts_are_drawn_in_proportion_to_the_spread_of_their_rewards() -> None:
    allocation = Allocation(2)
    for prompt in PROMPTS:
        allocation.drop_if_void(prompt, [a_shard([0.5 - prompt.index / 40, 0.5 + prompt.index / 40, 0.5])])
    drawn = Counter(index for iteration in range(5, 1005) for index in an_iteration(allocation, iteration))
    assert drawn[9] > drawn[6] > drawn[3] > drawn[1] > drawn[0] > 0
    assert drawn[6] / drawn[3] == pytest.approx(2, rel=0.25)


def test_missing_rewards_count_as_no_spread() -> None:
    allocation = Allocation(2)
    allocation.drop_if_void(PROMPTS[0], [a_shard([0.0, 1.0, np.nan])])
    allocation.drop_if_void(PROMPTS[1], [a_shard([np.nan] * 3)])
    assert allocation.spread == {0: 0.5, 1: 0.0}


def test_runs_outside_the_block_choose_as_before() -> None:
    with allocated(4) as allocation:
        assert cast(Any, learner.loop.groups.prompt_at).__self__ is allocation
    assert learner.loop.groups.prompt_at is prompt_at
