"""Fewer gradients: a share of the steps, and one velocity for members with the same state."""

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
    MicroBatch,
    RowsPerState,
    ShardTask,
    StepChoice,
    micro_batches,
    require_same_rows,
    shard_tasks,
)
from learner.update.objective import Objective
from protocol.config.run import RunConfig
from protocol.errors import ContractError
from protocol.messages import ScoredGroup
from tests.support.learning.gradients import relative_difference, watch_gradients
from tests.support.learning.groups import alone, draw_groups, iterate, learn

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
    "tree": (TREE, {0: 1, 1: 2, 2: 2, 3: 4, 4: 7}),
    "tree, cut forwards": (TREE | {"model": {"forward_batch": 3}}, {0: 1, 1: 2, 2: 2, 3: 4, 4: 7}),
}
"""Settings, and by step the states of a shard that differ."""


@dataclass(frozen=True)
class Scene:
    """Two scored groups of two shards, and a learner that trained on all of their steps."""

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
    return list(micro_batches(task, task.shard.rollout, rows_per_state=alone, device=CPU))


def test_a_share_of_the_steps_is_that_of_exact_arithmetic(scene: Scene) -> None:
    """0.58 of 50 is 29; the floating-point product is a little less."""
    facts = replace(scene.tasks(StepChoice())[0].shard.facts, steps=tuple(range(50)))
    assert len(StepChoice(fraction=0.58).columns(facts)) == 29


def test_the_learner_trains_the_chosen_steps_and_nothing_else(
    scene: Scene,
    gradient: Callable[[MicroBatch], torch.Tensor],
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch_gradients(monkeypatch)
    settings = {"updates_per_iteration": 1, "step_fraction": 0.6}
    config = tiny_config(group={"size": 4, "shard": 2, "per_iteration": 2}, learner=settings)
    learner = Learner(config)
    metrics = learn(config, scene.groups, learner)
    tasks = scene.tasks(StepChoice(fraction=0.6, seed=config.seed))
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

    def found(rows_per_state: RowsPerState, k: int) -> tuple[torch.Tensor, int]:
        """The gradient of the shard's losses at step k, and the velocities that it took."""
        for parameter in lora.parameters.values():
            parameter.grad = None
        policy.gradient_evaluations = 0
        batches = micro_batches(task, task.shard.rollout, rows_per_state=rows_per_state, device=CPU, keeps_idle=True)
        objective = Objective(policy, lora, config.learner)
        torch.cat([objective(each).loss for each in batches if each.k == k]).sum().backward()
        parts = [each.grad.flatten() for each in lora.parameters.values() if each.grad is not None]
        return torch.cat(parts), policy.gradient_evaluations

    branches = 2 if config.model.guidance > 1 else 1
    for k, different in states.items():
        ours, evaluations = found(policy.rows_per_state, k)
        theirs, _ = found(alone, k)
        assert relative_difference(theirs, ours) < 1e-5
        assert evaluations == branches * different


def test_a_step_whose_state_all_members_share_takes_one_gradient(tiny_config: Config) -> None:
    config = tiny_config(**ONE_STEP, group={"size": 4, "shard": 4, "per_iteration": 2}, learner={"probe_every": 0})
    learner, policy = Learner(config), RolloutPolicy(config)
    assert iterate(learner, policy, config)["work/gradient_evaluations"] == 2 * 1


def test_rows_that_must_have_the_same_state_and_differ_are_refused() -> None:
    states = np.zeros((4, 1, 2, 2), np.float32)
    require_same_rows(states, 4, k=0)
    states[2:] = 1
    require_same_rows(states, 2, k=3)
    require_same_rows(states, 1, k=3)
    states[3, 0, 1, 1] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(ContractError, match="split in step 3 must have the same state"):
        require_same_rows(states, 2, k=3)


def task_of(config: RunConfig) -> ShardTask:
    """The first shard of an iteration with its credit, under an adapter that has learnt something."""
    learner, policy = Learner(config), RolloutPolicy(config)
    adapter = learner.adapter()
    policy.receive(adapter)
    groups = draw_groups(policy, config, adapter, iteration=0)
    learn(config, groups, learner)
    strides = build_policy(config, device="cpu")[0].strides
    return shard_tasks(groups[:1], [learner.credit(0)], choice=StepChoice(), strides=strides)[0]
