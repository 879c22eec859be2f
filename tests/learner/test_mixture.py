"""Advantages of several rewards mixed after normalisation; each reward's own gains; groups set aside."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from learner.metrics import group_metrics
from learner.minibatch import credit_group
from learner.mixture import gain_metrics, mixed_advantages
from learner.setting_aside import set_aside_if_void
from protocol.config import RunConfig
from protocol.config_learning import CreditConfig
from protocol.errors import ConfigError, ContractError
from protocol.messages import Prompt, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest
from rewards.answers import judged, partly
from rewards.mixture import mix

A = np.array([[0.5, 0.62, 0.58, 0.66], [0.5, 0.46, 0.55, 0.53]], np.float32)
B = np.array([[20, 22, 21, 25], [20, 21, 24, 23]], np.float32)


def shard(first: int, scores: Scores, members: int = 1) -> ScoredShard:
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text="a"),
        first_member=first,
        members=members,
        version=0,
        digest="",
    )
    rollout = Rollout(
        request=request,
        steps=(0, 1, 2),
        latents=np.zeros((members, 5, 1, 1, 1), np.float32),
        log_probs=np.zeros((members, 3), np.float32),
        image_index=np.arange(4 * members).reshape(members, 4),
    )
    return ScoredShard(rollout=rollout, scores=scores)


def group(a: np.ndarray = A, b: np.ndarray = B, weights: tuple[float, float] = (0.7, 0.3)) -> ScoredGroup:
    """Two members in two shards, scored by `a` and `b`."""
    shards = []
    for member in range(2):
        parts = {"a": judged(a[member]), "b": judged(b[member], {"detail": b[member] / 2})}
        shards.append(shard(member, mix(parts, dict(zip("ab", weights, strict=True)))))
    return ScoredGroup(prompt=Prompt(index=0, text="a"), shards=tuple(shards))


def z_scores(table: np.ndarray) -> np.ndarray:
    gains = np.diff(table.astype(np.float64))
    return (gains - gains.mean()) / (gains.std() + 1e-4)


def test_each_reward_is_normalised_by_itself_and_the_weighted_advantages_add_up() -> None:
    credited = credit_group(group(), CreditConfig(), members=2, weights={"a": 0.7, "b": 0.3})
    np.testing.assert_allclose(credited.advantages, 0.7 * z_scores(A) + 0.3 * z_scores(B), atol=1e-5)


def test_a_reward_s_scale_changes_the_sum_of_raw_scores_and_not_the_sum_of_advantages() -> None:
    weights = {"a": 0.5, "b": 0.5}
    plain, scaled = group(), group(b=B / 1000)
    for mixed, is_equal in ((weights, True), (None, False)):
        small, large = (credit_group(g, CreditConfig(epsilon=0), members=2, weights=mixed) for g in (scaled, plain))
        assert torch.allclose(small.advantages, large.advantages, atol=1e-3) is is_equal


def test_one_reward_of_weight_one_is_the_same_either_way() -> None:
    shards = tuple(shard(member, mix({"a": judged(A[member])}, {"a": 1.0})) for member in range(2))
    alone = ScoredGroup(prompt=Prompt(index=0, text="a"), shards=shards)
    apart, together = (credit_group(alone, CreditConfig(), members=2, weights=w) for w in ({"a": 1.0}, None))
    assert torch.equal(apart.advantages, together.advantages)


def test_a_point_that_one_reward_misses_is_masked_in_all() -> None:
    first = mix({"a": partly(A[0], ["", "lost", "", ""]), "b": judged(B[0])}, {"a": 1.0, "b": 1.0})
    second = mix({"a": judged(A[1]), "b": judged(B[1])}, {"a": 1.0, "b": 1.0})
    held = ScoredGroup(prompt=Prompt(index=0, text="a"), shards=(shard(0, first), shard(1, second)))
    credited = credit_group(held, CreditConfig(), members=2, weights={"a": 1.0, "b": 1.0})
    assert credited.step_valid.tolist() == [[False, False, True], [True, True, True]]
    assert credited.advantages[0, :2].tolist() == [0, 0] and credited.advantages.isfinite().all()


def test_a_reward_without_a_table_breaks_the_contract() -> None:
    with pytest.raises(ContractError, match=r"needs a score of every reward, got none of \['c'\]"):
        mixed_advantages({}, torch.ones(1, 1, dtype=torch.bool), weights={"c": 1.0}, normalised=lambda t, v: t)


def test_every_reward_s_gains_and_curve_are_recorded() -> None:
    metrics = gain_metrics([group().shards])
    assert metrics["gain/a/step_0_mean"] == pytest.approx((0.12 - 0.04) / 2)
    assert metrics["gain/a/step_0_abs_mean"] == pytest.approx((0.12 + 0.04) / 2)
    assert metrics["gain/b/step_2_mean"] == pytest.approx((4 - 1) / 2)
    assert not any("detail" in name for name in metrics)
    credited = credit_group(group(), CreditConfig(), members=2)
    whole = group_metrics([group()], [credited])
    assert whole["reward/a"] == pytest.approx((0.66 + 0.53) / 2)
    assert whole["reward/b"] == pytest.approx(24)
    assert whole["gain/b/step_0_mean"] == pytest.approx(1.5)


def test_a_void_picture_sets_its_whole_group_aside_and_no_other() -> None:
    kept = (shard(0, judged([1, 2, 3, 4])), shard(1, partly([1, 2, float("nan"), 4], ["", "", "lost", ""])))
    assert set_aside_if_void(kept) == kept
    from dataclasses import replace

    void = (kept[0], replace(kept[1], scores=replace(kept[1].scores, voids_group=True)))
    aside = set_aside_if_void(void)
    assert not any(shard.scores.valid.any() for shard in aside)
    assert aside[0].scores.reasons == ("the group is set aside: lost",) * 4


def configs(tiny_config, **rewards) -> RunConfig:
    return tiny_config(rewards=rewards, evaluation={"component": "reward"})


def test_held_out_scorers_take_no_part_in_the_weights(tiny_config) -> None:
    config = configs(
        tiny_config, a={"scorer": "geneval", "weight": 0.5}, b={"scorer": "ocr", "use": "evaluate", "weight": 9}
    )
    assert config.weights == {"a": 0.5}
    with pytest.raises(ConfigError, match="at least one of rewards must have use=train"):
        configs(tiny_config, a={"scorer": "geneval", "use": "evaluate"})


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
