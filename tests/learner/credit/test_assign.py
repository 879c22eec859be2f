"""From scored shards of an iteration to advantages: windows, shards that share a point, scopes, weights, silence."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from deploy.presets import read_method
from flow.maths.windows import strides_of
from learner.credit.assign import Assignment, assign_credit
from learner.credit.normalisers import joint, per_step
from learner.credit.rules import gae, gains
from learner.credit.tables import reward_tables
from learner.update.metrics import group_metrics
from learner.update.micro_batches import StepChoice, micro_batches, shard_tasks
from protocol.config.credit import CreditConfig
from protocol.errors import ContractError
from protocol.messages import (
    COMMON_IMAGE,
    NO_IMAGE,
    Credit,
    Prompt,
    Rollout,
    ScoredGroup,
    ScoredShard,
    Scores,
    ShardRequest,
)
from tests.support.learning.groups import alone
from tests.support.learning.plain_credit import PLAIN

REWARDS = np.array(
    [[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]], np.float32
)
PROMPT = Prompt(index=0, text="a red circle")
TOTAL = 6


def shard(
    rewards: np.ndarray, steps: tuple[int, ...], *, first: int = 0, is_common: bool = False, group: int = 0
) -> ScoredShard:
    """A shard whose images have these rewards [N, P], each point of each member with an image of its own."""
    members, points = rewards.shape
    index = np.arange(members * points).reshape(members, points)
    values = rewards.reshape(-1)
    if is_common:
        index = np.concatenate([np.full((members, 1), COMMON_IMAGE), index[:, : points - 1]], axis=1)
        index[:, 1:] = np.arange(members * (points - 1)).reshape(members, points - 1)
        values = rewards[:, 1:].reshape(-1)
    valid = np.isfinite(values)
    rollout = Rollout(
        request=ShardRequest(
            iteration=3,
            group=group,
            prompt=PROMPT,
            first_member=first,
            members=members,
            adapter_version=0,
            adapter_digest="",
        ),
        steps=steps,
        latents=np.zeros((members, TOTAL + 1, 1, 1, 1), np.float32),
        log_probs=np.zeros((members, len(steps)), np.float32),
        image_index=index,
    )
    reasons = tuple("" if ok else "blurred" for ok in valid)
    return ScoredShard(
        rollout=rollout, facts=rollout.facts(), scores=Scores(values=values, valid=valid, reasons=reasons)
    )


def group_of(*shards: ScoredShard) -> ScoredGroup:
    return ScoredGroup(prompt=PROMPT, shards=shards)


def assigned(
    *groups: ScoredGroup, members: int = 3, weights: Any = None, baseline: Any = None, **credit: Any
) -> Assignment:
    return assign_credit(
        reward_tables(groups, members=members, total=TOTAL),
        CreditConfig(**(PLAIN | credit)),
        reward_weights={},
        step_weights=torch.ones(TOTAL) if weights is None else torch.tensor(weights),
        baseline=baseline,
    )


def test_the_advantages_of_all_granularities_add_up() -> None:
    """Three members at one step, two rewards each: their own end, and that of the second granularity."""

    def with_ends(own: Sequence[float], coarse: Sequence[float]) -> ScoredShard:
        held = shard(np.array([own, coarse], np.float32).T, (2,))
        index = np.arange(6).reshape(3, 2)
        rollout = replace(held.rollout, image_index=index[:, :1], further_index=index[:, 1:])
        return replace(held, rollout=rollout, facts=rollout.facts())

    credit = {"rule": "uniform", "normalise": "per_step", "ddof": 1, "epsilon": 0.0}
    found = assigned(group_of(with_ends([0.1, 0.3, 0.8], [0.2, 0.1, 0.6])), **credit)
    assert found.advantages[0, :, 2].tolist() == pytest.approx([-1.210015, -1.033279, 2.243294], abs=1e-5)
    assert found.step_rewards[0, :, 2].tolist() == pytest.approx([0.15, 0.2, 0.7])
    clipped = assigned(group_of(with_ends([0.1, 0.3, 0.8], [0.2, 0.1, 0.6])), **credit, advantage_clip=1.5)
    assert clipped.advantages[0, :, 2].tolist() == pytest.approx([-1.210015, -1.033279, 1.5], abs=1e-5)
    lacking = assigned(group_of(with_ends([0.1, 0.3, 0.8], [0.2, np.nan, 0.6])), **credit)
    assert lacking.advantages[0, :, 2].tolist() == pytest.approx([-(2**0.5), 0.0, 2**0.5], abs=1e-5)
    assert lacking.step_rewards[0, :, 2].isnan().tolist() == [False, True, False]


def test_granular_grpo_clamps_the_sum_of_two_rewards_advantages() -> None:
    """The release's number: eleven images equal and one better is 3.175426 for each reward, 6.350853 in all."""
    values = np.zeros((12, 1), np.float32)
    values[11] = 1.0
    held = shard(values, (2,))
    scored = replace(
        held, scores=replace(held.scores, components={"one": held.scores.values, "two": held.scores.values})
    )
    method = read_method("granular_grpo")
    credit = CreditConfig(**(PLAIN | method["identity"]["credit"] | method["settings"]["credit"]))
    found = assign_credit(
        reward_tables([group_of(scored)], members=12, total=TOTAL),
        credit,
        reward_weights={"one": 1.0, "two": 1.0},
        step_weights=torch.ones(TOTAL),
    )
    assert found.advantages[0, :, 2].tolist() == pytest.approx([-2 * 0.288675] * 11 + [5.0], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "rewards", "advantages"),
    [
        ("branch_grpo", [0.2, 0.7], [-0.707107, 0.707107]),
        ("e_grpo", [0.0] * 6 + [1.0] * 6, [-((11 / 12) ** 0.5)] * 6 + [(11 / 12) ** 0.5] * 6),
    ],
)
def test_a_method_s_std_is_its_release_s_with_ddof_1(name: str, rewards: list[float], advantages: list[float]) -> None:
    credit = read_method(name)["identity"]["credit"] | {"rule": "uniform"}
    group = group_of(shard(np.array(rewards, np.float32)[:, None], (2,)))
    found = assigned(group, members=len(rewards), **credit)
    assert found.advantages[0, :, 2].tolist() == pytest.approx(advantages, abs=1e-5)


def test_flow_dppo_s_std_counts_each_image_of_the_iteration_once() -> None:
    """The release's numbers for two groups of three images; each reward stands at two trained steps here."""
    credit = read_method("flow_dppo")["identity"]["credit"] | {"rule": "uniform"}
    rewards = [[0.2, 0.5, 0.9], [0.1, 0.1, 0.4]]
    groups = [group_of(shard(np.array(own, np.float32)[:, None], (1, 2))) for own in rewards]
    found = assigned(*groups, **credit)
    released = np.array([[-1.0833784, -0.1083377, 1.1917164], [-0.3250135, -0.3250135, 0.6500271]])
    for k in (1, 2):
        assert found.advantages[..., k].numpy() == pytest.approx(released, abs=1e-6)


def test_elbo_divides_the_differences_from_the_mean_by_ten() -> None:
    credit = read_method("elbo")["identity"]["credit"]
    found = assigned(group_of(shard(np.array([[0.2], [0.5], [np.nan]], np.float32), (1, 2))), **credit)
    assert found.advantages[0, :, 1:3].tolist() == pytest.approx(np.array([[-0.015] * 2, [0.015] * 2, [0.0] * 2]))


def expected(normalise: Any) -> torch.Tensor:
    rewards = torch.from_numpy(REWARDS)
    return normalise(gains(rewards), epsilon=1e-4)


def test_advantages_stand_at_their_step_of_the_schedule() -> None:
    held = assigned(group_of(shard(REWARDS, (1, 2, 3, 4))))
    assert torch.equal(held.advantages[0, :, 1:5], expected(joint))
    assert not held.advantages[0, :, [0, 5]].any()
    assert held.step_rewards[0].isnan().sum(0).tolist() == [3, 0, 0, 0, 0, 3]


def test_shards_that_refer_to_the_common_image_take_the_first_shard_s_score() -> None:
    parts = shard(REWARDS[:1], (0, 1, 2, 3)), shard(REWARDS[1:], (0, 1, 2, 3), first=1, is_common=True)
    tables = reward_tables([group_of(*parts)], members=3, total=TOTAL)
    assert np.array_equal(tables.rewards[0][:, [0, 1, 2, 3, 6]].numpy(), REWARDS)
    assert tables.rewards[0][:, 4:6].isnan().all()
    assert tables.explored[0].tolist() == [[True] * 4 + [False] * 2] * 3
    assert torch.equal(assigned(group_of(*parts)).advantages[0, :, :4], expected(joint))


def test_shards_of_a_group_are_one_group_to_value_calibration() -> None:
    whole = assigned(group_of(shard(REWARDS, (0, 1, 2, 3))), values="calibrated")
    parts = shard(REWARDS[:1], (0, 1, 2, 3)), shard(REWARDS[1:], (0, 1, 2, 3), first=1)
    assert torch.equal(whole.advantages, assigned(group_of(*parts), values="calibrated").advantages)


def test_with_final_images_only_no_other_point_has_a_reward() -> None:
    tables = reward_tables([group_of(shard(REWARDS[:, -1:], (0, 1)))], members=3, total=TOTAL)
    assert torch.equal(tables.rewards[0, :, -1], torch.from_numpy(REWARDS[:, -1]))
    assert tables.rewards[0, :, :-1].isnan().all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_valid_score_that_is_no_number_is_refused(number: float) -> None:
    odd = shard(REWARDS.copy(), (0, 1, 2, 3))
    odd.scores.values[3] = number
    with pytest.raises(ContractError, match="a valid score must be finite, got NaN or infinity"):
        assigned(group_of(odd))


def test_a_missing_score_of_the_common_image_voids_every_first_gain() -> None:
    rewards = REWARDS.copy()
    rewards[0, 0] = np.nan
    parts = shard(rewards[:1], (0, 1, 2, 3)), shard(rewards[1:], (0, 1, 2, 3), first=1, is_common=True)
    (step_rewards,) = assigned(group_of(*parts)).step_rewards
    assert step_rewards[:, 0].isnan().all()
    assert step_rewards[:, 1:4].isfinite().all()


def sparse(rewards: np.ndarray = REWARDS) -> ScoredShard:
    """The shard of the worked example whose second and fourth point are skipped."""
    held = shard(rewards.copy(), (0, 1, 2, 3))
    index = held.facts.image_index.copy()
    index[:, [1, 3]] = NO_IMAGE
    return replace(held, facts=replace(held.facts, image_index=index))


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ({}, [[0.04, 0.04, 0.06, 0.06], [0.025, 0.025, 0.025, 0.025], [-0.005, -0.005, -0.045, -0.045]]),
        (
            {"rule": "gae", "gae_lambda": 0.5},
            [[0.07, 0.07, 0.06, 0.06], [0.0375, 0.0375, 0.025, 0.025], [-0.0275, -0.0275, -0.045, -0.045]],
        ),
    ],
    ids=["gains", "gae"],
)
def test_steps_between_two_scored_points_share_what_they_earned(
    credit: dict[str, Any], expected: list[list[float]]
) -> None:
    (step_rewards,) = assigned(group_of(sparse()), **credit).step_rewards
    torch.testing.assert_close(step_rewards[:, :4], torch.tensor(expected), rtol=0, atol=1e-6)
    assert step_rewards[:, 4:].isnan().all()


def test_skipped_points_have_neither_slope_nor_value() -> None:
    found, whole = (assigned(group_of(each), values="calibrated") for each in (sparse(), shard(REWARDS, (0, 1, 2, 3))))
    slopes, values = found.slopes, found.values
    assert slopes is not None and values is not None and whole.slopes is not None
    assert slopes[:4].isnan().tolist() == [False, True, False, True]
    assert values[0, :, [1, 3]].isnan().all()
    assert slopes[[0, 2]].tolist() == whole.slopes[[0, 2]].tolist()
    two = values[0, :, 2] - values[0, :, 0], values[0, :, TOTAL] - values[0, :, 2]
    for step, gain in enumerate(two):
        torch.testing.assert_close(found.step_rewards[0, :, 2 * step], gain / 2)
        assert torch.equal(found.step_rewards[0, :, 2 * step], found.step_rewards[0, :, 2 * step + 1])


def test_equal_shares_are_gains_of_values_interpolated_between_scored_points() -> None:
    """So says docs/method/completions.md of `gains`; GAE sums over the scored points alone."""
    found = assigned(group_of(sparse()), values="calibrated")
    assert found.values is not None
    scored = found.values[0][:, [0, 2, TOTAL]].numpy()
    every = torch.from_numpy(np.array([np.interp(range(5), [0, 2, 4], row) for row in scored], np.float32))
    torch.testing.assert_close(found.step_rewards[0, :, :4], gains(every), rtol=0, atol=1e-6)
    assert gains(every).abs().max() > 0.01
    shares = assigned(group_of(sparse()), values="calibrated", rule="gae", gae_lambda=0.5).step_rewards[0, :, :4]
    assert (shares - gae(every, decay=0.5)).abs().max() > 0.01


def test_each_reward_of_a_mixture_has_gains_between_skipped_points_too() -> None:
    held = sparse()
    components = {"one": held.scores.values, "other": 2 * held.scores.values}
    group = group_of(replace(held, scores=replace(held.scores, components=components)))
    found = group_metrics([group], reward_tables([group], members=3, total=TOTAL), assigned(group))
    steps = [found["step_reward/step_0_abs_mean"], *(found[f"gain/one/step_{k}_abs_mean"] for k in range(4))]
    assert steps == pytest.approx([0.07 / 3, 0.07 / 3, 0.07 / 3, 0.13 / 3, 0.13 / 3], abs=1e-6)
    assert [found[f"gain/other/step_{k}_mean"] for k in range(4)] == pytest.approx([0.04, 0.04, 0.08 / 3, 0.08 / 3])


def test_stepwise_fast_judges_a_step_by_what_the_point_before_it_had_not_shown() -> None:
    """The worked number of docs/method/stepwise.md: the second of three points is skipped."""
    held = shard(np.array([[0.5, 0, 0.6, 0.6], [0.5, 0, 0.5, 0.3], [0.5, 0, 0.4, 0.45]], np.float32), (0, 1, 2))
    index = held.facts.image_index.copy()
    index[:, 1] = NO_IMAGE
    fast = read_method("stepwise_fast")["identity"]["credit"] | {"epsilon": 0.0, "step_weights": {"rule": "none"}}
    found = assigned(group_of(replace(held, facts=replace(held.facts, image_index=index))), **fast)
    assert found.slopes is not None and found.slopes[2].item() == pytest.approx(0.75)
    first, last = [0.04875, -0.0225, -0.02625], [0.075, -0.15, 0.075]
    torch.testing.assert_close(found.step_rewards[0, :, :3].T, torch.tensor([first, first, last]), rtol=0, atol=1e-6)
    first, last = [1.412821, -0.652071, -0.760750], [0.707107, -1.414214, 0.707107]
    torch.testing.assert_close(found.advantages[0, :, :3].T, torch.tensor([first, first, last]), rtol=0, atol=1e-5)


def test_stepwise_tree_judges_a_step_without_what_the_twin_predicts() -> None:
    """The worked number of docs/method/stepwise.md: four members, whose pairs part at the third step."""
    method = read_method("stepwise_tree")["identity"]
    credit = method["credit"] | {"epsilon": 0.0, "step_weights": {"rule": "none"}}
    group = group_of(shard(np.array([[0.8], [0.6], [0.3], [0.3]], np.float32), (1, 2, 3)))
    tables = reward_tables([group], members=4, total=TOTAL, strides=partial(strides_of, method["sampling"]["splits"]))
    config = CreditConfig(**(PLAIN | credit))
    found = assign_credit(tables, config, reward_weights={}, step_weights=torch.ones(TOTAL))
    assert found.slopes is not None
    torch.testing.assert_close(found.slopes[1:4], torch.tensor([0.0, 0.0, 7 / 9], dtype=torch.float64))
    nan = torch.nan
    first, last = [0.2, nan, -0.2, nan], [2 / 9, -2 / 15, -2 / 45, -2 / 45]
    expected = torch.tensor([first, first, last])
    torch.testing.assert_close(found.step_rewards[0, :, 1:4].T, expected, rtol=0, atol=1e-6, equal_nan=True)
    first, last = [1.176697, 0.0, -1.176697, 0.0], [1.307441, -0.784465, -0.261488, -0.261488]
    torch.testing.assert_close(found.advantages[0, :, 1:4].T, torch.tensor([first, first, last]), rtol=0, atol=1e-5)


def test_a_missing_score_voids_the_steps_on_both_sides_of_its_point() -> None:
    rewards = REWARDS.copy()
    rewards[1, 2] = np.nan
    (step_rewards,) = assigned(group_of(sparse(rewards))).step_rewards
    assert step_rewards[1, :4].isnan().all()
    assert step_rewards[[0, 2], :4].isfinite().all()


def test_branches_of_a_group_are_compared_at_their_own_step() -> None:
    first = shard(np.array([[0.1], [0.3]], np.float32), (0,))
    second = shard(np.array([[0.7], [0.9]], np.float32), (4,), first=2)
    held = assigned(group_of(first, second), members=4, rule="uniform", normalise="per_step", epsilon=0.0)
    assert held.advantages[0, :, 0].tolist() == pytest.approx([-1, 1, 0, 0], abs=1e-6)
    assert held.advantages[0, :, 4].tolist() == pytest.approx([0, 0, -1, 1], abs=1e-6)


def test_the_trees_of_a_group_s_shards_are_separate() -> None:
    finals = np.array([[0.1], [0.3], [0.5], [0.9], [0.2], [0.7]], np.float32)
    group = group_of(shard(finals[:3], (0, 1)), shard(finals[3:], (0, 1), first=3))
    tables = reward_tables([group], members=6, total=TOTAL, strides=lambda _: {0: 2, 1: 1})
    found = assign_credit(
        tables,
        CreditConfig(**(PLAIN | {"rule": "tree"})),
        reward_weights={},
        step_weights=torch.ones(TOTAL),
    ).step_rewards[0]
    nan = np.nan
    np.testing.assert_allclose(found[:, 0], [0.2, nan, 0.5, 0.55, nan, 0.7], rtol=1e-6)
    np.testing.assert_array_equal(found[:, 1], finals[:, 0])


def test_groups_of_different_windows_stand_side_by_side() -> None:
    early, late = shard(REWARDS[:, :3], (0, 1)), shard(REWARDS[:, 2:], (3, 4), group=1)
    first, second = assigned(group_of(early), group_of(late), normalise="per_step").advantages
    assert torch.equal(first[:, :2], expected(per_step)[:, :2])
    assert torch.equal(second[:, 3:5], expected(per_step)[:, 2:])


def test_the_iteration_s_std_is_that_of_all_groups() -> None:
    finals = REWARDS[:, -1:], np.array([[0.9], [0.8], [0.8]], np.float32)
    groups = [group_of(shard(rewards, (0, 1), group=index)) for index, rewards in enumerate(finals)]
    first, second = assigned(*groups, rule="uniform", scale="iteration").advantages
    assert first[:, 0].tolist() == pytest.approx([0.815997, 0.203999, -1.019996], abs=2e-5)
    assert second[:, 1].tolist() == pytest.approx([0.407998, -0.203999, -0.203999], abs=2e-5)


def test_weights_multiply_after_the_clip() -> None:
    weights = [1.8, 1.0, 1.0, 1.3, 1.0, 1.0]
    (advantages,) = assigned(
        group_of(shard(REWARDS, (0, 1, 2, 3))),
        weights=weights,
        advantage_clip=1.0,
        step_weights={"rule": "table", "table": weights},
    ).advantages
    assert torch.equal(advantages[:, :4], expected(joint).clamp(-1, 1) * torch.tensor(weights[:4]))


def test_a_baseline_begins_with_the_batch_s_mean_and_moves_after_use() -> None:
    groups = (group_of(shard(REWARDS, (0, 1, 2, 3))),)
    first = assigned(*groups, normalise="ema")
    assert first.baseline is not None
    assert first.baseline[:4].tolist() == pytest.approx([0.05, -0.01, 0.01 / 3, 0.07 / 3], abs=1e-6)
    assert first.baseline[4:].isnan().all()
    held = torch.tensor([0.02, 0.0, 0.01, 0.02, float("nan"), float("nan")], dtype=torch.float64)
    second = assigned(*groups, normalise="ema", baseline=held)
    assert second.advantages[0, 0, :4].tolist() == pytest.approx([1.580424, -0.632170, 1.106297, 0.316085], abs=2e-5)
    assert second.baseline is not None
    assert second.baseline[:4].tolist() == pytest.approx([0.023, -0.001, 0.009333, 0.020333], abs=1e-6)
    assert assigned(*groups).baseline is None


def test_a_step_that_the_baseline_has_not_seen_takes_its_own_mean_and_leaves_the_others_as_they_are() -> None:
    """A window that moves trains steps that no iteration before had."""
    groups = (group_of(shard(REWARDS, (0, 1, 2, 3))),)
    held = torch.tensor([0.02, float("nan"), 0.01, 0.02, float("nan"), float("nan")], dtype=torch.float64)
    known = torch.where(held.isnan(), torch.tensor([0, -0.01, 0, 0, 0, 0], dtype=torch.float64), held)
    advantages = assigned(*groups, normalise="ema", baseline=held).advantages
    assert advantages.isfinite().all()
    torch.testing.assert_close(advantages, assigned(*groups, normalise="ema", baseline=known).advantages)
    assert advantages.any()


def test_turning_points_are_balanced_over_the_groups_of_the_iteration() -> None:
    rising = np.array([[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]], np.float32)
    alone = assigned(group_of(shard(rising, (0, 1))), members=2, rule="turning_point", normalise="per_step")
    assert alone.step_rewards[0, 0, 0].item() == pytest.approx(0.2)
    groups = group_of(shard(rising, (0, 1))), group_of(shard(1 - 2 * rising, (0, 1), group=1))
    (first, _) = assigned(*groups, members=2, rule="turning_point", normalise="per_step").step_rewards
    assert first[0, 0].item() == pytest.approx(0.2)
    crowd = (group_of(shard(rising * 3, (0, 1))), *groups)
    assert assigned(*crowd, members=2, rule="turning_point").step_rewards[1, 0, 0].item() == pytest.approx(0.1)


def test_two_groups_of_one_text_stay_two_groups() -> None:
    """Released code groups by decoded text; here a group is what was drawn together."""
    high = group_of(shard(REWARDS + 5, (0, 1, 2, 3), group=1))
    first, second = assigned(group_of(shard(REWARDS, (0, 1, 2, 3))), high, rule="uniform").advantages
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_a_group_without_any_score_trains_nothing() -> None:
    silent = group_of(shard(np.full_like(REWARDS, np.nan), (0, 1, 2, 3)))
    held = assigned(silent, group_of(shard(REWARDS, (0, 1, 2, 3), group=1)))
    first, second = held.advantages
    assert not first.any()
    assert torch.equal(second[:, :4], expected(joint))
    assert batches([silent], held, keeps_idle=True) == []


def batches(
    groups: Sequence[ScoredGroup], held: Assignment, choice: StepChoice | None = None, *, keeps_idle: bool = False
) -> list[int]:
    """Step of each micro-batch of the assignment's first groups."""
    device, choice = torch.device("cpu"), choice or StepChoice()
    return [
        part.k
        for task in shard_tasks(groups, credits_of(groups, held), choice=choice)
        for part in micro_batches(task, task.shard.rollout, rows_per_state=alone, device=device, keeps_idle=keeps_idle)
    ]


def credits_of(groups: Sequence[ScoredGroup], held: Assignment) -> list[Credit]:
    """The message of each group's credit."""
    rewards = np.zeros((3, TOTAL + 1), np.float32)
    return [
        Credit(adapter_version=1, rewards=rewards, step_rewards=own.numpy(), advantages=advantages.numpy())
        for _, own, advantages in zip(groups, held.step_rewards, held.advantages, strict=False)
    ]


def test_a_share_of_the_steps_is_drawn_for_each_shard_and_epoch() -> None:
    groups = [group_of(shard(REWARDS, (0, 1, 2, 3), group=index)) for index in range(12)]
    held = assigned(*groups)

    def trained(epoch: int, seed: int = 0) -> list[int]:
        return batches(groups, held, StepChoice(fraction=0.6, seed=seed, epoch=epoch))

    assert len(trained(0)) == 24, "two of four steps of each group"
    assert trained(0) == trained(0)
    assert trained(0) != trained(1)
    assert trained(0) != trained(0, seed=1)
    assert set(trained(0)) == {0, 1, 2, 3}
    tasks = shard_tasks(groups, credits_of(groups, held), choice=StepChoice(fraction=0.6))
    assert sum(task.pairs for task in tasks) == sum(task.all_pairs for task in tasks) == 24 * 3


def test_pairs_of_an_idle_shard_come_only_for_a_kl_term() -> None:
    equal = np.repeat(REWARDS[:, :1], 5, axis=1)
    group = group_of(shard(equal[:, :3], (0, 1)))
    held = assigned(group)
    assert not held.advantages.any()
    assert batches([group], held) == []
    assert batches([group], held, keeps_idle=True) == [0, 1]


def test_a_group_that_is_not_whole_is_refused() -> None:
    whole = shard(REWARDS, (0, 1, 2, 3))
    odd = replace(whole, facts=replace(whole.facts, request=replace(whole.facts.request, first_member=1)))
    with pytest.raises(ContractError, match=r"members 0 to 2 in order, got \[1, 2, 3\]"):
        assigned(group_of(odd))


def test_calibrated_values_are_what_gains_are_taken_of_and_the_rewards_stay() -> None:
    group = group_of(shard(REWARDS, (1, 2, 3, 4)))
    held = assigned(group, values="calibrated")
    assert held.step_rewards[0, 0, 1:5].tolist() == pytest.approx([0.015672, 0.024328, 0.076667, 0.016667], abs=1e-6)
    tables = reward_tables([group], members=3, total=TOTAL)
    assert np.array_equal(tables.rewards[0][:, [1, 2, 3, 4, 6]].numpy(), REWARDS)
    metrics = group_metrics([group], tables, held)
    assert {name: value for name, value in metrics.items() if name.endswith("_slope")} == pytest.approx(
        {"credit/step_1_slope": 0, "credit/step_2_slope": 0.223881, "credit/step_3_slope": 1, "credit/step_4_slope": 1},
        abs=1e-6,
    )
    assert assigned(group_of(shard(REWARDS, (1, 2, 3, 4)))).slopes is None


def test_a_group_of_equal_rewards_trains_nothing_with_calibrated_values() -> None:
    same = np.full((3, 5), 0.1, np.float32)
    groups = group_of(shard(REWARDS, (0, 1, 2, 3))), group_of(shard(same, (0, 1, 2, 3), group=1))
    first, second = assigned(*groups, values="calibrated").advantages
    assert first.any()
    assert not second.any()


def test_a_calibrated_point_without_a_slope_is_as_good_as_not_scored() -> None:
    rewards = REWARDS.copy()
    rewards[:, 4] = np.nan
    assignment = assigned(group_of(shard(rewards, (1, 2, 3, 4))), rule="gains", values="calibrated", normalise="ema")
    assert assignment.step_rewards.isnan().all() and not assignment.advantages.any()
    assert assignment.baseline is not None and assignment.baseline[1:5].isnan().all()
    # A step whose only scored points have no finished image leaves the others' std alone.
    first, second = REWARDS.copy(), REWARDS.copy()
    first[0, 2:], second[:, 2] = (np.nan, 0.5, np.nan), np.nan
    first[1:, 2:4] = np.nan
    choice = {"rule": "gains", "values": "calibrated", "normalise": "joint", "scale": "iteration"}
    groups = group_of(shard(first, (1, 2, 3, 4))), group_of(shard(second, (1, 2, 3, 4), group=1))
    advantages = assigned(*groups, **choice).advantages
    assert advantages.isfinite().all()
    assert advantages[1].any()
