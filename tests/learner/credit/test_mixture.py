"""Advantages of several rewards mixed after normalisation; each reward's own gains."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.credit.assign import Assignment, assign_credit
from learner.credit.tables import reward_tables
from learner.update.metrics import group_metrics
from protocol.config.credit import CreditConfig
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ContractError
from protocol.messages import COMMON_IMAGE, Prompt, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest
from rewards.scores import mix, partly, scored
from tests.support.learning.plain_credit import PLAIN

A = np.array([[0.5, 0.62, 0.58, 0.66], [0.5, 0.46, 0.55, 0.53]], np.float32)
B = np.array([[20, 22, 21, 25], [20, 21, 24, 23]], np.float32)


def shard(first: int, scores: Scores, members: int = 1) -> ScoredShard:
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text="a"),
        first_member=first,
        members=members,
        adapter_version=0,
        adapter_digest="",
    )
    rollout = Rollout(
        request=request,
        steps=(0, 1, 2),
        latents=np.zeros((members, 4, 1, 1, 1), np.float32),
        log_probs=np.zeros((members, 3), np.float32),
        image_index=np.arange(4 * members).reshape(members, 4),
    )
    return ScoredShard(rollout=rollout, facts=rollout.facts(), scores=scores)


def group(a: np.ndarray = A, b: np.ndarray = B, weights: tuple[float, float] = (0.7, 0.3)) -> ScoredGroup:
    """Two members in two shards, scored by `a` and `b`."""
    shards = []
    for member in range(2):
        parts = {"a": scored(a[member]), "b": scored(b[member], {"detail": b[member] / 2})}
        shards.append(shard(member, mix(parts, dict(zip("ab", weights, strict=True)))))
    return ScoredGroup(prompt=Prompt(index=0, text="a"), shards=tuple(shards))


def z_scores(table: np.ndarray) -> np.ndarray:
    gains = np.diff(table.astype(np.float64))
    return (gains - gains.mean()) / (gains.std() + 1e-4)


def mixed(groups: list[ScoredGroup], rewards: dict[str, float], **credit) -> Assignment:
    config = CreditConfig(**(PLAIN | {"mixture": "advantages"} | credit))
    tables = reward_tables(groups, members=2, total=3)
    return assign_credit(tables, config, reward_weights=rewards, step_weights=torch.ones(3))


def metrics_of(*groups: ScoredGroup) -> dict[str, float]:
    held = list(groups)
    return group_metrics(held, reward_tables(held, members=2, total=3), mixed(held, {"a": 0.7, "b": 0.3}))


def gains_of(*groups: ScoredGroup) -> dict[str, float]:
    """The metrics of each reward's own gains."""
    return {name: value for name, value in metrics_of(*groups).items() if name.startswith(("gain/a/", "gain/b/"))}


def test_each_reward_is_normalised_by_itself_and_the_weighted_advantages_add_up() -> None:
    assignment = mixed([group(), group(a=A[::-1])], {"a": 0.7, "b": 0.3})
    for row, a in enumerate((A, A[::-1])):
        np.testing.assert_allclose(assignment.advantages[row], 0.7 * z_scores(a) + 0.3 * z_scores(B), atol=1e-5)
        np.testing.assert_allclose(assignment.step_rewards[row], np.diff(0.7 * a + 0.3 * B), atol=1e-4)


def test_a_reward_s_scale_changes_the_sum_of_raw_scores_and_not_the_sum_of_advantages() -> None:
    for mixture, is_equal in (("advantages", True), ("rewards", False)):
        small, large = (
            mixed([g], {"a": 0.5, "b": 0.5}, epsilon=0, mixture=mixture).advantages
            for g in (group(b=B / 1000), group())
        )
        assert torch.allclose(small, large, atol=1e-3) is is_equal


def test_one_reward_of_weight_one_is_the_same_either_way() -> None:
    shards = tuple(shard(member, mix({"a": scored(A[member])}, {"a": 1.0})) for member in range(2))
    alone = ScoredGroup(prompt=Prompt(index=0, text="a"), shards=shards)
    apart, together = (mixed([alone], {"a": 1.0}, mixture=m).advantages for m in ("advantages", "rewards"))
    assert torch.equal(apart, together) and apart.any()


def test_a_point_that_one_reward_misses_is_masked_in_all() -> None:
    first = mix({"a": partly(A[0], ["", "lost", "", ""]), "b": scored(B[0])}, {"a": 1.0, "b": 1.0})
    second = mix({"a": scored(A[1]), "b": scored(B[1])}, {"a": 1.0, "b": 1.0})
    held = ScoredGroup(prompt=Prompt(index=0, text="a"), shards=(shard(0, first), shard(1, second)))
    assignment = mixed([held], {"a": 1.0, "b": 1.0})
    assert assignment.step_rewards[0].isnan().tolist() == [[True, True, False], [False, False, False]]
    assert assignment.advantages[0, 0, :2].tolist() == [0, 0] and assignment.advantages.isfinite().all()


def test_a_dropped_group_is_mixed_too_and_a_reward_without_scores_breaks_the_contract() -> None:
    aside = ScoredGroup(
        prompt=Prompt(index=0, text="a"), shards=tuple(shard(i, Scores.missing(4, "down")) for i in (0, 1))
    )
    assignment = mixed([aside, group()], {"a": 1.0, "b": 1.0})
    assert not assignment.advantages[0].any() and assignment.step_rewards[0].isnan().all()
    assert assignment.advantages[1].any()
    with pytest.raises(ContractError, match="needs a score of every reward, got none of 'c'"):
        mixed([group()], {"a": 1.0, "c": 1.0})


def test_a_shared_first_image_counts_for_every_shard_of_the_group() -> None:
    held = group()
    index = np.array([[COMMON_IMAGE, 1, 2, 3]])
    second = replace(held.shards[1], facts=replace(held.shards[1].facts, image_index=index))
    shared = replace(held, shards=(held.shards[0], second))
    assert gains_of(shared) == gains_of(held), "both members start from the same score here"
    moved = group(a=A + np.array([[0.1], [0.0]], np.float32))
    shared = replace(moved, shards=(moved.shards[0], second))
    assert gains_of(shared)["gain/a/step_0_mean"] == pytest.approx((0.12 + (0.46 - 0.6)) / 2, abs=1e-6)


def test_mixed_advantages_and_one_running_mean_exclude_each_other(tiny_config) -> None:
    with pytest.raises(ConfigError, match="credit.mixture advantages normalises each reward separately"):
        tiny_config(credit={"mixture": "advantages", "normalise": "ema"})


def test_every_reward_s_gains_and_curve_are_recorded() -> None:
    metrics = gains_of(group())
    assert metrics["gain/a/step_0_mean"] == pytest.approx((0.12 - 0.04) / 2)
    assert metrics["gain/a/step_0_abs_mean"] == pytest.approx((0.12 + 0.04) / 2)
    assert metrics["gain/b/step_2_mean"] == pytest.approx((4 - 1) / 2)
    assert not any("detail" in name for name in metrics)
    whole = metrics_of(group())
    assert whole["reward/a"] == pytest.approx((0.66 + 0.53) / 2)
    assert whole["reward/b"] == pytest.approx(24)
    assert whole["gain/b/step_0_mean"] == pytest.approx(1.5)


def configs(tiny_config, **rewards) -> RunConfig:
    return tiny_config(rewards=rewards, evaluation={"component": "reward"})


def test_held_out_scorers_take_no_part_in_the_weights(tiny_config) -> None:
    config = configs(
        tiny_config, a={"scorer": "geneval", "weight": 0.5}, b={"scorer": "ocr", "use": "evaluate", "weight": 9}
    )
    assert config.reward_weights == {"a": 0.5}
    with pytest.raises(ConfigError, match="at least one of rewards must have use=train"):
        configs(tiny_config, a={"scorer": "geneval", "use": "evaluate"})
    with pytest.raises(ConfigError, match="a reward's name must be letters, digits, _ and -, got 'a/b'"):
        configs(tiny_config, **{"a/b": {"scorer": "geneval"}})


@pytest.mark.parametrize("name", ["mean", "group_std", "missing", "score"])
def test_a_reward_cannot_take_the_name_of_another_number(tiny_config, name: str) -> None:
    """`reward/mean` would be this reward's mean instead of the mixture's, without a word."""
    with pytest.raises(ConfigError, match=f"names another number of a run, got {name!r}"):
        configs(tiny_config, **{name: {"scorer": "geneval"}})


def test_where_scores_are_made_may_change_on_a_resumed_run_and_what_is_scored_may_not(tiny_config) -> None:
    def fields(**reward) -> dict:
        return configs(tiny_config, a={"scorer": "geneval", **reward}).outcome_fields()

    same: Sequence[dict] = (
        {"actors": 3, "batch": 8, "tries": 1, "on_failure": "fail", "timeout_s": 5.0},
        {"resources": {"ocr_node": 1}, "runtime_env": {"pip": ["x"]}, "cpus": 2},
    )
    assert all(fields(**change) == fields() for change in same)
    for change in ({"weight": 2.0}, {"args": {"reward": "strict"}}):
        assert fields(**change) != fields()
