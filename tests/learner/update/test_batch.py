"""`learner.batch`: the learner cuts shards otherwise than the rollout, where that leaves each row its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flow.models.pipeline import PipelineBackbone
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.support.learning.groups import iterate, require_exact_ratios

Config = Callable[..., RunConfig]
GROUP = {"size": 4, "shard": 4, "per_iteration": 1}


def computing(monkeypatch: pytest.MonkeyPatch, velocity: Callable[..., torch.Tensor]) -> list[int]:
    """Let the tiny pipeline compute otherwise; the returned list grows by the rows of each forward with a gradient."""
    plain, rows = PipelineBackbone.velocity, []

    def counted(model: PipelineBackbone, latents: torch.Tensor, *inputs: Any) -> torch.Tensor:
        rows.extend([len(latents)] * torch.is_grad_enabled())
        return velocity(lambda *each: plain(model, *each), latents, *inputs)

    monkeypatch.setattr(PipelineBackbone, "velocity", counted)
    return rows


def one_by_one(plain: Any, latents: torch.Tensor, sigma: torch.Tensor, prompts: Any) -> torch.Tensor:
    rows = [slice(row, row + 1) for row in range(len(latents))]
    return torch.cat([plain(latents[row], sigma[row], prompts.rows(row)) for row in rows])


def by_the_batch(plain: Any, latents: torch.Tensor, sigma: torch.Tensor, prompts: Any) -> torch.Tensor:
    return plain(latents, sigma, prompts) + 1e-6 * len(latents)


@pytest.mark.parametrize(("rollout", "learner"), [(None, 1), (1, 3)])
def test_where_rows_keep_their_bits_the_learner_has_a_batch_of_its_own_and_ratios_are_one(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, rollout: int | None, learner: int
) -> None:
    rows = computing(monkeypatch, one_by_one)
    config = tiny_config(group=GROUP, model={"forward_batch": rollout}, learner={"batch": learner})
    worker, policy = Learner(config), RolloutPolicy(config)
    rows.clear()
    require_exact_ratios(told := iterate(worker, policy, config), config)
    assert told["probe/ratio_deviation"] == 0.0 and told["train/grad_norm"] > 0
    assert max(rows) == {1: 1, 3: 2}[learner], "even pieces of four states"


@pytest.mark.parametrize(("rollout", "rule"), [(None, "batches of 4, got 2"), (1, "batches of 1, got 2")])
def test_where_rows_differ_the_key_is_refused_before_anything_is_made(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, rollout: int | None, rule: str
) -> None:
    computing(monkeypatch, by_the_batch)
    with pytest.raises(ConfigError, match=f"learner.batch .* {rule}, .* off by .*e-0[67]: leave it out") as refused:
        Learner(tiny_config(group=GROUP, model={"forward_batch": rollout}, learner={"batch": 2}))
    assert "\n" not in str(refused.value)


def test_a_batch_that_cuts_as_the_rollout_does_needs_no_check(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = computing(monkeypatch, by_the_batch)
    Learner(tiny_config(group=GROUP, learner={"batch": 4}))
    assert not rows
