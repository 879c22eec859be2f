"""Fewer gradients: micro-batches left out by |advantage|, and one velocity for members with the same state."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from flow.policy import build_policy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from learner.update.micro_batches import (
    Alike,
    MicroBatch,
    ShardTask,
    StepChoice,
    micro_batches,
    require_alike,
    shard_tasks,
    subsample_factor,
)
from learner.update.objective import Objective
from protocol.config.run import RunConfig
from protocol.errors import ContractError
from protocol.messages import ScoredGroup
from tests.support.learning.gradients import relative_difference, watch_gradients
from tests.support.learning.groups import alone, draw_groups, iterate, learn

BELOW = 1.0
CPU = torch.device("cpu")
Config = Callable[..., RunConfig]
KL = {"learner": {"kl": {"weight": 0.5}, "updates_per_iteration": 1}}
ONE_STEP = {"sampling": {"window": {"rule": "random", "size": 1, "within": [0.0, 0.75]}}}
TREE = {
    "sampling": {"steps": 6, "splits": [0.3, 0.5]},
    "group": {"size": 7, "shard": 7},
    "credit": {"rule": "tree", "normalise": "per_step"},
}
CASES: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "shared noise": ({"group": {"size": 4, "shard": 4}}, {0: 1, 1: 4, 2: 4}),
    "shared noise, two shards": ({"group": {"size": 4, "shard": 2}}, {0: 1, 1: 2, 2: 2}),
    "own noise": ({"group": {"size": 4, "shard": 4}, "sampling": {"shared_noise": False}}, {0: 4, 1: 4, 2: 4}),
    "guided, with kl": ({"group": {"size": 4, "shard": 4}, "model": {"guidance": 3.0}} | KL, {0: 1, 1: 4, 2: 4}),
    "masked": ({"group": {"size": 4, "shard": 4}, "learner": {"objective": "masked"}}, {0: 1, 1: 4, 2: 4}),
    "distillation": ({"group": {"size": 4, "shard": 4}, "learner": {"objective": "distillation"}}, {0: 1, 1: 4, 2: 4}),
    "tree": (TREE, {0: 1, 1: 2, 2: 2, 3: 4, 4: 7}),
    "tree, cut forwards": (TREE | {"model": {"forward_batch": 3}}, {0: 1, 1: 2, 2: 2, 3: 4, 4: 7}),
}
"""Settings, and by step the states of a shard that differ."""


@dataclass(frozen=True)
class Scene:
    """Two scored groups of two shards, and what a learner without subsampling made of them."""

    config: RunConfig
    groups: Sequence[ScoredGroup]
    learner: Learner

    def tasks(self, choice: StepChoice) -> list[ShardTask]:
        return shard_tasks(self.groups, [self.learner.credit(group) for group in range(2)], choice=choice)


@pytest.fixture(scope="module")
def scene(tiny_config: Callable[..., RunConfig]) -> Scene:
    config = tiny_config(group={"size": 4, "shard": 2, "per_iteration": 2}, learner={"updates_per_iteration": 1})
    policy, learner = RolloutPolicy(config), Learner(config)
    policy.receive(learner.adapter())
    groups = draw_groups(policy, config, learner.adapter(), iteration=0)
    learn(config, groups, learner)
    return Scene(config, groups, learner)


@pytest.fixture(scope="module")
def gradient(scene: Scene) -> Callable[[MicroBatch], torch.Tensor]:
    """The gradient of a micro-batch's summed losses, at the adapter that rolled out."""
    policy, lora = build_policy(scene.config, device="cpu")
    objective = Objective(policy, lora, scene.config.learner)

    def of(micro_batch: MicroBatch) -> torch.Tensor:
        for parameter in lora.parameters.values():
            parameter.grad = None
        objective(micro_batch).loss.sum().backward()
        found = [each.grad if each.grad is not None else torch.zeros_like(each) for each in lora.parameters.values()]
        return torch.cat([each.flatten() for each in found]).double()

    return of


def batches_of(task: ShardTask) -> list[MicroBatch]:
    return list(micro_batches(task, task.shard.rollout, alike=alone, device=CPU))


def test_a_loss_that_trains_with_a_chance_counts_once_on_average() -> None:
    for tenths in range(1, 11):
        factors = [subsample_factor(tenths / 10, (drawn + 0.5) / 1000) for drawn in range(1000)]
        assert np.mean(factors) == pytest.approx(1.0)
        assert set(factors) <= {0.0, 10 / tenths}
    assert subsample_factor(0.0, 0.0) == 0.0


def test_the_expected_gradient_is_the_whole_one(scene: Scene, gradient: Callable[[MicroBatch], torch.Tensor]) -> None:
    """Every pattern of kept and dropped micro-batches, each with its probability."""
    task = scene.tasks(StepChoice())[0]
    whole = sum(map(gradient, batches_of(task)))
    chances = {k: min(1.0, size / BELOW) for k, size in task.sizes().items()}
    assert len(chances) == 3 and max(chances.values()) < 1
    expected, total = torch.zeros_like(whole), 0.0
    for kept in itertools.product((True, False), repeat=len(chances)):
        probability = math.prod(p if keeps else 1 - p for keeps, p in zip(kept, chances.values(), strict=True))
        if probability:
            factors = {k: 1 / p if keeps else 0.0 for keeps, (k, p) in zip(kept, chances.items(), strict=True)}
            parts = map(gradient, batches_of(replace(task, factors=factors)))
            expected, total = expected + probability * sum(parts, torch.zeros_like(whole)), total + probability
    assert total == pytest.approx(1)
    assert relative_difference(whole, expected) < 1e-6


def test_each_micro_batch_trains_as_often_as_its_advantages_say(scene: Scene) -> None:
    seeds = 600
    choices = [StepChoice(seed=seed, subsample_below=BELOW) for seed in range(seeds)]
    for task in scene.tasks(StepChoice()):
        sizes = task.sizes()
        factors = [choice.factors(task.shard.facts, sizes) for choice in choices]
        for k, size in sizes.items():
            chance = min(1.0, size / BELOW)
            kept = np.mean([each.get(k, 1.0) > 0 for each in factors])
            assert abs(kept - chance) <= 4 * math.sqrt(chance * (1 - chance) / seeds)
            assert all(each.get(k, 1.0) in (0.0, pytest.approx(1 / chance)) for each in factors)


def test_a_share_of_the_steps_is_that_of_exact_arithmetic(scene: Scene) -> None:
    """0.58 of 50 is 29; the floating-point product is a little less."""
    facts = replace(scene.tasks(StepChoice())[0].shard.facts, steps=tuple(range(50)))
    assert len(StepChoice(fraction=0.58).columns(facts)) == 29


def test_draws_differ_by_step_shard_epoch_and_seed(scene: Scene) -> None:
    facts = [task.shard.facts for task in scene.tasks(StepChoice())]

    def pattern(choice: StepChoice) -> list[dict[int, float]]:
        return [choice.factors(each, dict.fromkeys(range(9), 0.5)) for each in facts]

    choice = StepChoice(subsample_below=BELOW)
    assert pattern(choice) == pattern(choice)
    assert len({str(each) for each in pattern(choice)}) == len(facts)
    assert set(pattern(choice)[0].values()) == {0.0, 2.0}
    for other in (replace(choice, epoch=1), replace(choice, seed=1)):
        assert pattern(other) != pattern(choice)


def test_the_learner_trains_what_was_drawn_and_nothing_else(
    scene: Scene,
    gradient: Callable[[MicroBatch], torch.Tensor],
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch_gradients(monkeypatch)
    settings = {"updates_per_iteration": 1, "subsample_below": BELOW}
    config = tiny_config(group={"size": 4, "shard": 2, "per_iteration": 2}, learner=settings)
    learner = Learner(config)
    metrics = learn(config, scene.groups, learner)
    tasks = scene.tasks(StepChoice(seed=config.seed, subsample_below=BELOW))
    drawn = [micro_batch for task in tasks for micro_batch in batches_of(task)]
    whole = [micro_batch for task in scene.tasks(StepChoice()) for micro_batch in batches_of(task)]
    assert 0 < len(drawn) < len(whole)
    first = min(each.k for each in whole)
    states = [1 if each.k == first else 2 for each in drawn]
    assert metrics["work/gradient_evaluations"] == sum(states), "the first step's two members have one state"
    expected = torch.stack([gradient(each) for each in drawn]).sum(0) / sum(task.pairs for task in tasks)
    assert relative_difference(expected, seen[0].double()) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_one_velocity_for_each_member(tiny_config: Config, name: str) -> None:
    settings, states = CASES[name]
    config = tiny_config(**settings)
    task = task_of(config)
    policy, lora = build_policy(config, device="cpu")

    def found(alike: Alike, k: int) -> tuple[torch.Tensor, int]:
        """The gradient of the shard's losses at step k, and the velocities that it took."""
        for parameter in lora.parameters.values():
            parameter.grad = None
        policy.gradient_evaluations = 0
        batches = micro_batches(task, task.shard.rollout, alike=alike, device=CPU, keeps_idle=True)
        objective = Objective(policy, lora, config.learner)
        torch.cat([objective(each).loss for each in batches if each.k == k]).sum().backward()
        parts = [each.grad.flatten() for each in lora.parameters.values() if each.grad is not None]
        return torch.cat(parts), policy.gradient_evaluations

    branches = 2 if config.model.guidance > 1 else 1
    for k, different in states.items():
        ours, evaluations = found(policy.alike, k)
        theirs, _ = found(alone, k)
        assert relative_difference(theirs, ours) < 1e-5
        assert evaluations == branches * different


def test_a_step_whose_state_all_members_share_takes_one_gradient(tiny_config: Config) -> None:
    config = tiny_config(**ONE_STEP, group={"size": 4, "shard": 4, "per_iteration": 2}, learner={"probe_every": 0})
    learner, policy = Learner(config), RolloutPolicy(config)
    assert iterate(learner, policy, config)["work/gradient_evaluations"] == 2 * 1


def test_rows_that_must_have_the_same_state_and_differ_are_refused() -> None:
    states = np.zeros((4, 1, 2, 2), np.float32)
    require_alike(states, 4, k=0)
    states[2:] = 1
    require_alike(states, 2, k=3)
    require_alike(states, 1, k=3)
    states[3, 0, 1, 1] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(ContractError, match="split in step 3 must have the same state"):
        require_alike(states, 2, k=3)


def task_of(config: RunConfig) -> ShardTask:
    """The first shard of an iteration with its credit, under an adapter that has learnt something."""
    learner, policy = Learner(config), RolloutPolicy(config)
    adapter = learner.adapter()
    policy.receive(adapter)
    groups = draw_groups(policy, config, adapter, iteration=0)
    learn(config, groups, learner)
    strides = build_policy(config, device="cpu")[0].strides
    return shard_tasks(groups[:1], [learner.credit(0)], choice=StepChoice(), strides=strides)[0]
