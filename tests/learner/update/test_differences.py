"""Whole updates of methods against an oracle: its advantages in numpy, its loss with torch.distributions, its slope by
differences of the adapter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from deploy.presets import load_config
from flow.maths.noise import normal
from flow.policy import FlowPolicy, build_policy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.messages import Rollout, ScoredGroup, ScoredShard, digest_of
from tests.support.learning.gradients import watch_gradients
from tests.support.learning.groups import draw_groups, learn

Config = Callable[..., RunConfig]
STEP = 0.003
"""Length of a difference, in the space of the adapter's numbers."""


@dataclass(frozen=True)
class Pairs:
    """Trajectories of one shard at one step, with the advantages that the oracle gives them."""

    rollout: Rollout
    rows: slice
    k: int
    following: int
    """The point that the step leads to."""
    advantages: np.ndarray


def finals(shard: ScoredShard) -> np.ndarray:
    return shard.scores.values[shard.facts.image_index[:, -1]].astype(np.float64)


def standardised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std() + 1e-8)


def e_grpo(group: ScoredGroup) -> Iterator[Pairs]:
    """Steps 0 to 1 and 1 to 2 alone, 2 to 5 merged: each shard explores one of them and is compared with itself."""
    for shard in group.shards:
        (k,) = shard.facts.steps
        yield Pairs(shard.rollout, slice(None), k, {0: 1, 1: 2, 2: 5}[k], standardised(finals(shard)))


def branch_grpo(group: ScoredGroup) -> Iterator[Pairs]:
    """Splits at steps 0 and 2: nodes of two leaves at the steps 0 and 1, leaves from step 2 on."""
    (shard,) = group.shards
    for k in shard.facts.steps:
        stride = 2 if k < 2 else 1
        nodes = finals(shard).reshape(-1, stride).mean(1)
        yield Pairs(shard.rollout, slice(None, None, stride), k, k + 1, standardised(nodes))


def granular_grpo(group: ScoredGroup) -> Iterator[Pairs]:
    """Each shard explores one step; the ends of both granularities are standardised alone and added."""
    for shard in group.shards:
        (k,) = shard.facts.steps
        assert shard.facts.further_index is not None
        ends = [finals(shard), shard.scores.values[shard.facts.further_index[:, 0]].astype(np.float64)]
        advantages = sum((values - values.mean()) / (values.std(ddof=1) + 1e-8) for values in ends)
        yield Pairs(shard.rollout, slice(None), k, k + 1, np.asarray(advantages))


ORACLES: Mapping[str, tuple[Callable[[ScoredGroup], Iterator[Pairs]], dict[str, Any], list[str]]] = MappingProxyType(
    {
        "e_grpo": (
            e_grpo,
            {"sampling": {"steps": 6, "schedule": "linear"}, "group": {"size": 9, "shard": 3}},
            ["sampling.merge_std=0.6", "sampling.window.within=[0.0,0.5]", "group.shard=3"],
        ),
        "granular_grpo": (
            granular_grpo,
            {"sampling": {"steps": 6, "schedule": "linear"}, "group": {"size": 9, "shard": 3}},
            ["group.shard=3", "credit.mixture=rewards"],
        ),
        "branch_grpo": (
            branch_grpo,
            {"sampling": {"steps": 6, "schedule": "linear"}, "group": {"size": 6, "shard": 6}},
            ["sampling.splits=[0.0,0.3]", "learner.step_fraction=1.0"],
        ),
    }
)


def std_of(config: RunConfig, t: float, following: float, first: float) -> float:
    """The kernels' table in docs/method/kernels.md."""
    level, h = config.sampling.noise_level, t - following
    g = level if config.sampling.kernel == "dance_sde" else level * (t / (1 - (first if t == 1 else t))) ** 0.5
    return g * h**0.5


def log_probs(policy: FlowPolicy, config: RunConfig, pairs: Pairs) -> torch.Tensor:
    """Mean log-density of the step over the latents, float64."""
    prompt = pairs.rollout.request.prompt
    x, after = (torch.from_numpy(pairs.rollout.latents[pairs.rows, p].copy()) for p in (pairs.k, pairs.following))
    t, following, first = (policy.sigmas[p].item() for p in (pairs.k, pairs.following, 1))
    v = policy.velocity(x, torch.full((len(x),), t), policy.conditioning(prompt.text, prompt.negative)).double()
    std, h = std_of(config, t, following, first), t - following
    noise = x.double() + (1 - t) * v
    mean = x.double() - h * (v + std**2 / h / (2 * t) * noise)
    return Normal(mean, std).log_prob(after.double()).flatten(1).mean(1)


@torch.no_grad()
def loss(policy: FlowPolicy, config: RunConfig, pairs: list[Pairs], old: list[torch.Tensor]) -> float:
    """PPO's loss, the mean over all pairs."""
    terms = []
    for each, before in zip(pairs, old, strict=True):
        ratio, a = (log_probs(policy, config, each) - before).exp(), torch.from_numpy(each.advantages)
        c = config.learner.clip_range
        terms.append(torch.maximum(-a * ratio, -a * ratio.clamp(1 - c, 1 + c)))
    return torch.cat(terms).mean().item()


@pytest.mark.parametrize("name", ORACLES)
def test_an_update_s_gradient_is_the_slope_of_the_oracle_s_loss(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Along the gradient itself the slope is its norm, which a wrong part of the gradient would change; and along
    another direction."""
    oracle, preset, overrides = ORACLES[name]
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config(**preset).to_yaml())
    wide = ["learner.clip_range=0.5", "learner.updates_per_iteration=1"]
    config = load_config(path, overrides=[f"method={name}", *wide, *overrides])
    learner, rollouts = Learner(config), RolloutPolicy(config)
    fresh = learner.adapter()
    arrays = {key: held + 0.05 * normal(key, shape=held.shape).numpy() for key, held in fresh.arrays.items()}
    adapter = replace(fresh, arrays=arrays, digest=digest_of(arrays))
    learner.restore(replace(learner.state(), adapter=adapter))
    rollouts.receive(adapter)
    groups = draw_groups(rollouts, config, adapter, iteration=0)
    seen = watch_gradients(monkeypatch)
    learn(config, groups, learner)
    (gradient,) = seen
    policy, lora = build_policy(config, device="cpu")
    lora.load(adapter)
    pairs = [each for group in groups for each in oracle(group)]
    with torch.no_grad():
        old = [log_probs(policy, config, each) for each in pairs]
    for each, before in zip(pairs, old, strict=True):
        assert each.rollout.log_probs is not None
        held = each.rollout.log_probs[each.rows, each.rollout.steps.index(each.k)]
        np.testing.assert_allclose(before, held, atol=1e-4)
    parameters = list(lora.parameters.values())
    sizes = [parameter.numel() for parameter in parameters]
    other = normal("direction", shape=gradient.shape)
    for direction in (gradient / gradient.norm(), other / other.norm()):
        values = []
        for way in (1, -1):
            lora.load(adapter)
            with torch.no_grad():
                for parameter, part in zip(parameters, direction.split(sizes), strict=True):
                    parameter.add_(way * STEP * part.view_as(parameter))
            values.append(loss(policy, config, pairs, old))
        slope = (values[0] - values[1]) / (2 * STEP)
        assert slope == pytest.approx((gradient @ direction).item(), rel=0.01, abs=0.003 * gradient.norm().item())
