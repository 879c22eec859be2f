"""From scored groups to the next adapter on the tiny pipeline: direction, exact continuation, refusals."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flow.policy import build_policy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError
from protocol.messages import Rollout, ScoredGroup, ScoredShard, digest_of
from tests.support.learning.groups import draw_groups, iterate, learn, log_probs_of, redness, scored
from tests.support.learning.plain_credit import PLAIN

Config = Callable[..., RunConfig]


def test_versions_grow_by_one_and_the_digest_follows_the_weights(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    seen = [learner.adapter()]
    for _ in range(2):
        iterate(learner, policy, config)
        seen.append(learner.adapter())
    assert [adapter.version for adapter in seen] == [0, 1, 2]
    assert len({adapter.digest for adapter in seen}) == 3


def test_step_weights_count_the_steps_of_the_schedule_and_not_of_the_window(tiny_config: Config) -> None:
    config = tiny_config(
        sampling={"steps": 10, "window": {"rule": "fixed", "first": 0, "size": 4}},
        credit={"rule": "uniform", "step_weights": {"rule": "piecewise"}},
        group={"per_iteration": 1},
    )
    learner, policy = Learner(config), RolloutPolicy(config)
    iterate(learner, policy, config)
    advantages = learner.credit(0).advantages
    np.testing.assert_allclose(advantages[:, :4], advantages[:, 3:4] * [1.8, 1.8, 1.8, 1.0], rtol=1e-6)
    assert np.ptp(advantages[:, 3]) > 1
    assert not advantages[:, 4:].any()


def test_the_running_mean_counts_the_optimizer_steps_that_are_done(tiny_config: Config) -> None:
    """Two steps an iteration: the mean of `every: 4` moves after step 3, in the second iteration, with d = 4 / 13."""
    config = tiny_config(
        learner={"updates_per_iteration": 2, "average": {"decay": 0.9, "every": 4}}, group={"per_iteration": 2}
    )
    learner, policy = Learner(config), RolloutPolicy(config)
    start = learner.adapter()
    iterate(learner, policy, config)
    state = learner.state()
    assert state.average is not None
    assert state.average.digest == start.digest
    iterate(learner, policy, config)
    state = learner.state()
    assert state.average is not None
    assert state.average.digest not in (start.digest, state.adapter.digest)


@pytest.mark.parametrize("rule", ["uniform", "gains"])
def test_an_update_makes_the_better_member_more_likely_and_the_worse_less(tiny_config: Config, rule: str) -> None:
    config = tiny_config(
        group={"size": 2, "shard": 2, "per_iteration": 1},
        credit={"rule": rule},
        learner={"learning_rate": 1e-3},
    )
    learner, policy = Learner(config), RolloutPolicy(config)
    adapter = learner.adapter()
    policy.receive(adapter)

    def first_is_better(rollout: Rollout, images: np.ndarray) -> np.ndarray:
        points = rollout.image_index.shape[1]
        rewards = np.zeros(len(images))
        for point in range(points):
            rewards[rollout.image_index[0, point]] = point / 10
            rewards[rollout.image_index[1, point]] = -point / 10
        return rewards if points > 1 else np.array([1.0, 0.0])

    groups = draw_groups(policy, config, adapter, iteration=0, judge=first_is_better)
    rollout = groups[0].shards[0].rollout
    learn(config, groups, learner)
    updated, lora = build_policy(config, device="cpu")
    lora.load(learner.adapter())
    change = (log_probs_of(updated, rollout).numpy() - rollout.log_probs).sum(1)
    assert change[0] > 0 > change[1]


def test_after_the_decay_an_update_moves_as_far_as_the_last_learning_rate(tiny_config: Config) -> None:
    """A step of AdamW moves no number much further than the learning rate."""
    config = tiny_config(learner={"learning_rate": 1e-2, "decay": {"iterations": 2, "to": 1e-6}, "weight_decay": 0.0})
    learner, policy = Learner(config), RolloutPolicy(config)
    rates, moved, before = [], [], learner.adapter().arrays
    for _ in range(4):
        rates.append(iterate(learner, policy, config)["train/learning_rate"])
        after = learner.adapter().arrays
        moved.append(max(np.abs(after[name] - before[name]).max() for name in after))
        before = after
    assert rates == pytest.approx([1e-2, 5.0005e-3, 1e-6, 1e-6])
    assert moved[0] > 1e-3
    assert max(moved[2:]) < 1e-5


@pytest.mark.parametrize("decay", [None, {"iterations": 2, "to": 1e-5}])
def test_a_restored_learner_goes_on_bitwise_like_an_uninterrupted_one(tiny_config: Config, decay: Any) -> None:
    config = tiny_config(learner={"updates_per_iteration": 2, "decay": decay})
    whole, policy = Learner(config), RolloutPolicy(config)
    iterate(whole, policy, config)
    halfway = whole.state()
    iterate(whole, policy, config)

    resumed, other_policy = Learner(config), RolloutPolicy(config)
    resumed.restore(halfway)
    assert resumed.iteration == 1
    assert resumed.adapter().digest == halfway.adapter.digest
    iterate(resumed, other_policy, config)
    iterate(whole, policy, config)
    iterate(resumed, other_policy, config)
    assert whole.iteration == resumed.iteration == 3
    assert whole.adapter().digest == resumed.adapter().digest
    first, second = whole.state().optimizer, resumed.state().optimizer
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_restore_also_takes_an_older_state_over_a_newer_learner(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    start = learner.state()
    iterate(learner, policy, config)
    once = learner.adapter()
    learner.restore(start)
    assert learner.iteration == 0
    assert learner.state().optimizer == {}
    iterate(learner, policy, config)
    assert learner.adapter().digest == once.digest


def test_a_state_is_a_copy(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    iterate(learner, policy, config)
    state = learner.state()
    held = {name: array.copy() for name, array in state.optimizer.items()}
    iterate(learner, policy, config)
    assert all(np.array_equal(state.optimizer[name], array) for name, array in held.items())
    assert {name.rsplit("/", 1)[1] for name in held} == {"exp_avg", "exp_avg_sq", "step"}


def test_an_adapter_is_copied_and_its_digest_computed_once_for_its_version(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    start = learner.state()
    assert learner.adapter() is start.adapter
    iterate(learner, policy, config)
    once = learner.adapter()
    assert learner.state().adapter is once
    assert once.digest == digest_of(once.arrays) != start.adapter.digest
    learner.restore(start)
    assert learner.adapter().digest == start.adapter.digest


def test_the_later_ones_of_several_updates_move_the_ratio(tiny_config: Config) -> None:
    config = tiny_config(learner={"updates_per_iteration": 2, "learning_rate": 1e-2})
    learner, policy = Learner(config), RolloutPolicy(config)
    iterate(learner, policy, config)
    steps = {name: value for name, value in learner.state().optimizer.items() if name.endswith("/step")}
    assert {float(value) for value in steps.values()} == {2.0}
    assert learner.iteration == 1
    assert iterate(learner, policy, config)["train/ratio_mean"] != 1.0


def test_an_iteration_without_one_valid_score_is_refused_with_the_first_reason(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    before = learner.adapter()

    def blind(_: Rollout, images: np.ndarray) -> np.ndarray:
        return np.full(len(images), np.nan)

    with pytest.raises(ContractError, match="got none; first reason: blurred"):
        iterate(learner, policy, config, judge=blind)
    assert learner.adapter().digest == before.digest
    assert learner.iteration == 0


def test_groups_in_which_nothing_differs_change_nothing(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    before = learner.adapter()

    def same(_: Rollout, images: np.ndarray) -> np.ndarray:
        return np.full(len(images), 0.3)

    metrics = iterate(learner, policy, config, judge=same)
    assert learner.adapter().digest == before.digest
    assert learner.iteration == 1
    assert metrics["group/zero_variance"] == 1.0
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/loss"] == 0.0


def test_missing_scores_are_counted_and_the_others_still_teach(tiny_config: Config) -> None:
    config = tiny_config(credit={"rule": "uniform"})
    learner, policy = Learner(config), RolloutPolicy(config)

    def half(_: Rollout, images: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(images)) == 0, np.nan, redness(_, images))

    metrics = iterate(learner, policy, config, judge=half)
    assert metrics["reward/missing"] == 4
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["train/grad_norm"] > 0


def damaged(groups: Sequence[ScoredGroup], shards: Callable[[tuple[ScoredShard, ...]], Any]) -> list[ScoredGroup]:
    return [replace(groups[0], shards=tuple(shards(groups[0].shards))), *groups[1:]]


def test_incomplete_or_disordered_groups_are_refused(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    policy.receive(learner.adapter())
    groups = draw_groups(policy, config, learner.adapter(), iteration=0)
    for shards, held in (
        (lambda each: each[:1], r"\[0, 1\]"),
        (lambda each: each[::-1], r"\[2, 3, 0, 1\]"),
        (lambda each: each[:1] * 2, r"\[0, 1, 0, 1\]"),
    ):
        with pytest.raises(ContractError, match=f"members 0 to 3 in order, got {held}"):
            learn(config, damaged(groups, shards), learner)
    too_few = scored(np.zeros(3))
    with pytest.raises(ContractError, match="7 images must have as many scores, got 3"):
        learn(config, damaged(groups, lambda each: (replace(each[0], scores=too_few), each[1])), learner)
    assert learner.iteration == 0


def moved(group: ScoredGroup, iteration: int, index: int, *shards: int) -> ScoredGroup:
    """The group as if it were another one of the run; only some of its shards, where they are named."""
    held = []
    for position, shard in enumerate(group.shards):
        request = replace(shard.facts.request, iteration=iteration, group=index)
        is_moved = not shards or position in shards
        held.append(replace(shard, facts=replace(shard.facts, request=request)) if is_moved else shard)
    return replace(group, shards=tuple(held))


@pytest.mark.parametrize(
    ("change", "odd"),
    [
        (lambda a, b: [moved(a, 3, 0), moved(b, 3, 1)], r"\[\(3, 0\)\] at index 0"),
        (lambda a, b: [b, a], r"\[\(0, 1\)\] at index 0"),
        (lambda a, b: [a, moved(b, 0, 0)], r"\[\(0, 0\)\] at index 1"),
        (lambda a, b: [moved(a, 0, 1, 1), b], r"\[\(0, 0\), \(0, 1\)\] at index 0"),
    ],
    ids=["another iteration's", "in another order", "one twice", "a shard of another group"],
)
def test_groups_that_are_not_this_iteration_s_own_in_order_are_refused(
    tiny_config: Config, change: Callable[[ScoredGroup, ScoredGroup], list[ScoredGroup]], odd: str
) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    policy.receive(learner.adapter())
    groups = change(*draw_groups(policy, config, learner.adapter(), iteration=0))
    with pytest.raises(ContractError, match=f"iteration 0 must learn from its own groups 0 to 1 in order, .*{odd}"):
        learn(config, groups, learner)


def test_the_ledger_numbers_the_groups_of_a_run_without_a_gap(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    found = [iterate(learner, policy, config) for _ in range(2)]
    assert [(metrics["ledger/first"], metrics["ledger/last"]) for metrics in found] == [(0, 1), (2, 3)]


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    before = learner.adapter()
    policy.receive(before)
    groups = draw_groups(policy, config, before, iteration=0)
    for shard in groups[0].shards:
        shard.rollout.log_probs[0, 0] = -np.inf
    with pytest.raises(NonFiniteError, match="must be finite"):
        learn(config, groups, learner)
    assert learner.adapter().digest == before.digest


def test_reward_metrics_are_those_of_the_finished_images(tiny_config: Config) -> None:
    config = tiny_config(group={"per_iteration": 1}, credit=PLAIN | {"values": "calibrated"})
    learner, policy = Learner(config), RolloutPolicy(config)

    def by_hand(rollout: Rollout, images: np.ndarray) -> np.ndarray:
        rewards = np.full(len(images), 0.5)
        rewards[rollout.image_index[:, -1]] = [0.7, 0.4] if rollout.request.first_member else [0.6, 0.3]
        return rewards

    metrics = iterate(learner, policy, config, judge=by_hand)
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/group_std"] == pytest.approx(np.std([0.7, 0.4, 0.6, 0.3]))
    assert metrics["reward/missing"] == 0
    assert metrics["step_reward/step_0_abs_mean"] == 0.0
    assert metrics["step_reward/step_2_abs_mean"] == pytest.approx((0.2 + 0.1 + 0.1 + 0.2) / 4)
    assert metrics["advantage/step_0_mean"] == pytest.approx(0, abs=1e-6)


def test_pairs_without_a_valid_gain_do_not_weigh_in_the_loss(tiny_config: Config) -> None:
    """The loss is the mean over valid pairs: with ratio 1 it is minus the mean advantage."""
    config = tiny_config(group={"per_iteration": 1}, credit=PLAIN | {"epsilon": 0.0, "advantage_clip": 1.0})
    learner, policy = Learner(config), RolloutPolicy(config)

    def one_peak(rollout: Rollout, images: np.ndarray) -> np.ndarray:
        rewards = np.zeros(len(images))
        rewards[rollout.image_index[0, -1]] = 1.0 if rollout.request.first_member == 0 else np.nan
        return rewards

    metrics = iterate(learner, policy, config, judge=one_peak)
    gains = np.zeros(11)
    gains[0] = 1.0
    advantages = np.clip((gains - gains.mean()) / gains.std(), -1, 1)
    assert metrics["train/loss"] == pytest.approx(-advantages.mean(), abs=1e-5)
