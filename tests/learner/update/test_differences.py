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
from torch.distributions import Normal, kl_divergence

from deploy.presets import load_config
from flow.adapter.lora import Lora
from flow.maths.noise import SHARED, forward_noise, normal
from flow.policy import FlowPolicy, build_policy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.messages import Adapter, Rollout, ScoredGroup, ScoredShard, digest_of
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


def standardised(values: np.ndarray, epsilon: float = 1e-8, ddof: int = 0) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=ddof) + epsilon)


def e_grpo(group: ScoredGroup) -> Iterator[Pairs]:
    """Steps 0 to 1 and 1 to 2 alone, 2 to 5 merged: each shard explores one of them and is compared with itself."""
    for shard in group.shards:
        (k,) = shard.facts.steps
        yield Pairs(shard.rollout, slice(None), k, {0: 1, 1: 2, 2: 5}[k], standardised(finals(shard), ddof=1))


def branch_grpo(group: ScoredGroup) -> Iterator[Pairs]:
    """Splits at steps 0 and 2: nodes of two leaves at the steps 0 and 1, leaves from step 2 on."""
    (shard,) = group.shards
    for k in shard.facts.steps:
        stride = 2 if k < 2 else 1
        nodes = finals(shard).reshape(-1, stride).mean(1)
        yield Pairs(shard.rollout, slice(None, None, stride), k, k + 1, standardised(nodes, ddof=1))


def stepwise_tree(group: ScoredGroup) -> Iterator[Pairs]:
    """Steps 0 to 2 have noise; pairs split at step 2, where each leaf is compared with what its twin predicts."""
    (shard,) = group.shards
    pairs = (finals(shard) - finals(shard).mean()).reshape(-1, 2)
    slope = np.clip(2 * (pairs[:, 0] * pairs[:, 1]).sum() / (pairs**2).sum(), 0, 1)
    leaves = (pairs - slope * pairs[:, ::-1]).reshape(-1)
    earned = {k: pairs.mean(1) if k < 2 else leaves for k in shard.facts.steps}
    std = np.concatenate(list(earned.values())).std()
    for k, values in earned.items():
        yield Pairs(shard.rollout, slice(None, None, 2 if k < 2 else 1), k, k + 1, values / (std + 1e-4))


def granular_grpo(group: ScoredGroup) -> Iterator[Pairs]:
    """Each shard explores one step; the ends of both granularities are standardised alone and added."""
    for shard in group.shards:
        (k,) = shard.facts.steps
        assert shard.facts.further_index is not None
        ends = [finals(shard), shard.scores.values[shard.facts.further_index[:, 0]].astype(np.float64)]
        advantages = sum(standardised(values, ddof=1) for values in ends)
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
        "stepwise_tree": (
            stepwise_tree,
            {"sampling": {"steps": 6, "schedule": "linear"}, "group": {"size": 6, "shard": 6}},
            [
                "sampling.window.size=3",
                "credit.step_weights.rule=none",
                "credit.scale=prompt",
                "group.per_iteration=1",
            ],
        ),
    }
)


def std_of(config: RunConfig, t: float, following: float, first: float) -> float:
    """The kernels' table in docs/method/kernels.md."""
    level, h = config.sampling.noise_level, t - following
    g = level if config.sampling.kernel == "dance_sde" else level * (t / (1 - (first if t == 1 else t))) ** 0.5
    return g * h**0.5


def density(policy: FlowPolicy, config: RunConfig, pairs: Pairs) -> tuple[Normal, torch.Tensor]:
    """The step's density, and the latents that the step led to, float64."""
    prompt = pairs.rollout.request.prompt
    x, after = (torch.from_numpy(pairs.rollout.latents[pairs.rows, p].copy()) for p in (pairs.k, pairs.following))
    t, following, first = (policy.sigmas[p].item() for p in (pairs.k, pairs.following, 1))
    v = policy.velocity(x, torch.full((len(x),), t), policy.conditioning(prompt.text, prompt.negative)).double()
    std, h = std_of(config, t, following, first), t - following
    noise = x.double() + (1 - t) * v
    mean = x.double() - h * (v + std**2 / h / (2 * t) * noise)
    return Normal(mean, std), after.double()


def log_probs(policy: FlowPolicy, config: RunConfig, pairs: Pairs) -> torch.Tensor:
    """Mean log-density of the step over the latents."""
    step, after = density(policy, config, pairs)
    return step.log_prob(after).flatten(1).mean(1)


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
def test_the_first_update_s_gradient_is_the_slope_of_the_oracle_s_loss(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Along the gradient itself the slope is its norm, which a wrong part of the gradient would change; and along
    another direction."""
    oracle, preset, overrides = ORACLES[name]
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config(**preset).to_yaml())
    wide = ["learner.clip_range=0.5", "learner.updates_per_iteration=1"]
    config = load_config(path, overrides=[f"method={name}", *wide, *overrides])
    learner = Learner(config)
    adapter = moved(learner.adapter(), "trained")
    learner.restore(replace(learner.state(), adapter=adapter))
    gradient, groups = gradient_of(config, learner, adapter, monkeypatch)
    policy, lora = build_policy(config, device="cpu")
    lora.load(adapter)
    pairs = [each for group in groups for each in oracle(group)]
    with torch.no_grad():
        old = [log_probs(policy, config, each) for each in pairs]
    for each, before in zip(pairs, old, strict=True):
        assert each.rollout.log_probs is not None
        held = each.rollout.log_probs[each.rows, each.rollout.steps.index(each.k)]
        np.testing.assert_allclose(before, held, atol=1e-4)
    require_slopes(gradient, adapter, lora, lambda: loss(policy, config, pairs, old))


Terms = tuple[torch.Tensor, torch.Tensor]
"""The loss of each pair, and whether the pair is held back."""


def clipped(config: RunConfig, a: torch.Tensor, new: Normal, old: Normal, after: torch.Tensor, h: float) -> Terms:
    ratio, c = (new.log_prob(after) - old.log_prob(after)).flatten(1).mean(1).exp(), config.learner.clip_range
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - c, 1 + c)), a * (ratio - 1) > a.abs() * c


def guarded(config: RunConfig, a: torch.Tensor, new: Normal, old: Normal, after: torch.Tensor, h: float) -> Terms:
    """What remains of the log-ratio is the mean of drift times noise."""
    noise = (after - old.mean) / old.stddev
    ratio, c = ((new.mean - old.mean) * noise).flatten(1).mean(1).exp(), config.learner.clip_range
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - c, 1 + c)) / h, a * (ratio - 1) > a.abs() * c


def masked(config: RunConfig, a: torch.Tensor, new: Normal, old: Normal, after: torch.Tensor, h: float) -> Terms:
    ratio = (new.log_prob(after) - old.log_prob(after)).flatten(1).mean(1).exp()
    is_far = kl_divergence(old, new).flatten(1).mean(1) > config.learner.divergence_bound
    return -a * ratio, is_far & (a * (ratio - 1) > 0)


OBJECTIVES: Mapping[str, tuple[Callable[..., Terms], list[str]]] = MappingProxyType(
    {
        "flow_grpo": (clipped, ["learner.clip_range=0.0003"]),
        "grpo_guard": (guarded, ["learner.clip_range=0.0002"]),
        # Its window is three steps of the first half.
        "flow_dppo": (masked, ["learner.divergence_bound=0.00003", "sampling.steps=6"]),
    }
)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_later_update_s_gradient_is_the_slope_of_the_pairs_that_are_not_held_back(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The adapter has moved since the rollout, so some pairs are clipped or masked, and the KL term is not 0.

    The methods of `ORACLES` have the objective of `flow_grpo`, whose clip binds here.
    """
    objective, overrides = OBJECTIVES[name]
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config(sampling={"steps": 4}, group={"size": 4}).to_yaml())
    kl = ["learner.kl.weight=0.1", "learner.kl.rule=no_dt"]
    once = ["learner.updates_per_iteration=1", "learner.probe_every=0"]
    config = load_config(path, overrides=[f"method={name}", *overrides, *kl, *once])
    learner = Learner(config)
    before = moved(learner.adapter(), "before")
    adapter = moved(before, "since", by=0.02)
    learner.restore(replace(learner.state(), adapter=adapter))
    gradient, groups = gradient_of(config, learner, before, monkeypatch)
    rewards = np.concatenate([finals(shard) for group in groups for shard in group.shards])
    scale = rewards.std(ddof=config.credit.ddof) + config.credit.epsilon
    policy, lora = build_policy(config, device="cpu")
    pairs = []
    for group in groups:
        mean = np.concatenate([finals(shard) for shard in group.shards]).mean()
        for shard in group.shards:
            advantages = (finals(shard) - mean) / scale
            pairs += [Pairs(shard.rollout, slice(None), k, k + 1, advantages) for k in shard.facts.steps]

    def parts(each: Pairs, old: Normal, base: Normal) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The policy term of each pair, whether it is held back, and its KL term."""
        new, after = density(policy, config, each)
        h = (policy.sigmas[each.k] - policy.sigmas[each.following]).item()
        terms = objective(config, torch.from_numpy(each.advantages), new, old, after, h)
        return *terms, 0.1 * kl_divergence(new, base).flatten(1).mean(1) * h

    with torch.no_grad():
        lora.load(before)
        olds = [density(policy, config, each)[0] for each in pairs]
        with lora.adapter_disabled():
            bases = [density(policy, config, each)[0] for each in pairs]
        lora.load(adapter)
        held = [parts(*each)[1] for each in zip(pairs, olds, bases, strict=True)]
    assert 0.15 < torch.cat(held).double().mean().item() < 0.6

    @torch.no_grad()
    def value() -> float:
        terms = []
        for is_held, *each in zip(held, pairs, olds, bases, strict=True):
            policy_term, _, kl = parts(*each)
            terms.append(policy_term * ~is_held + kl)
        return torch.cat(terms).mean().item()

    require_slopes(gradient, adapter, lora, value)


@pytest.mark.parametrize(("cut", "compared"), [(None, "base"), (3, "base"), (3, "old")])
def test_dgpo_s_gradient_is_the_slope_of_its_loss_at_a_constant_weight(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int | None, compared: str
) -> None:
    """One noise for a group, and one weight; also where the forwards hold a part of the group only.

    Members that have moved far from `old` in the direction of their advantage are held back.
    """
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config(sampling={"steps": 6}, group={"size": 4}, model={"forward_batch": cut}).to_yaml())
    keys = ["learner.step_fraction=1.0", "learner.updates_per_iteration=1", "learner.kl.weight=0.5"]
    keys += [f"learner.forward.compared={compared}", "learner.forward.clip_range=0.01", "sampling.window={rule: all}"]
    config = load_config(path, overrides=["method=dgpo", *keys])
    learner = Learner(config)
    adapter, old = (moved(learner.adapter(), name) for name in ("trained", "old"))
    learner.restore(replace(learner.state(), adapter=adapter, old=old))
    gradient, groups = gradient_of(config, learner, adapter, monkeypatch)
    policy, lora = build_policy(config, device="cpu")

    def matching(group: ScoredGroup, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The matching loss of each member and its velocity, with the adapter that is loaded."""
        (shard,) = group.shards
        request, clean = shard.rollout.request, torch.from_numpy(shard.rollout.latents[:, -1].copy())
        key = {"seed": config.seed, "iteration": 0, "group": request.group, "step": k, "epoch": 0}
        noise = forward_noise(**key, members=[SHARED], shape=clean.shape[1:])
        sigma = policy.sigmas[k]
        x = (1 - sigma) * clean + sigma * noise
        v = policy.velocity(x, sigma.expand(len(x)), policy.conditioning(request.prompt.text, request.prompt.negative))
        return (v - (noise - clean)).double().square().flatten(1).mean(1), v.double()

    cells = [(group, k) for group in groups for k in range(6)]
    with torch.no_grad():
        lora.load(old)
        olds = [matching(*cell)[0] for cell in cells]
        with lora.adapter_disabled():
            errors, bases = zip(*[matching(*cell) for cell in cells], strict=True)
        lora.load(adapter)
        own = [matching(*cell)[0] for cell in cells]
    advantages = [torch.from_numpy(standardised(finals(group.shards[0]), 1e-4)) for group, _ in cells]
    weights = [
        1 / (1 + np.exp(-100 * float((a * (now - other)).mean())))
        for a, now, other in zip(advantages, own, errors if compared == "base" else olds, strict=True)
    ]
    assert len({round(weight, 3) for weight in weights}) > 3
    ratios = [(then - now).exp() for then, now in zip(olds, own, strict=True)]
    held = [(a > 0) & (r > 1.01) | (a <= 0) & (r < 0.99) for a, r in zip(advantages, ratios, strict=True)]
    assert 0.15 < torch.cat(held).double().mean().item() < 0.6

    @torch.no_grad()
    def value() -> float:
        terms = []
        for cell, weight, a, is_held, base in zip(cells, weights, advantages, held, bases, strict=True):
            error, velocity = matching(*cell)
            terms.append(weight * a * error * ~is_held + 0.5 * (velocity - base).square().flatten(1).mean(1))
        return torch.cat(terms).mean().item()

    require_slopes(gradient, adapter, lora, value)


def moved(adapter: Adapter, name: str, by: float = 0.05) -> Adapter:
    """Far from fresh, where no part of the adapter is 0."""
    arrays = {key: held + by * normal(name, key, shape=held.shape).numpy() for key, held in adapter.arrays.items()}
    return replace(adapter, arrays=arrays, digest=digest_of(arrays))


def gradient_of(
    config: RunConfig, learner: Learner, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[ScoredGroup]]:
    """The gradient of the iteration's only optimizer step, and the groups that it comes from."""
    rollouts = RolloutPolicy(config)
    rollouts.receive(adapter)
    groups = draw_groups(rollouts, config, adapter, iteration=0)
    seen = watch_gradients(monkeypatch)
    learn(config, groups, learner)
    (gradient,) = seen
    return gradient, groups


def require_slopes(gradient: torch.Tensor, adapter: Adapter, lora: Lora, value: Callable[[], float]) -> None:
    """Require that differences of `value` are the gradient's part in two directions, one of them its own."""
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
            values.append(value())
        slope = (values[0] - values[1]) / (2 * STEP)
        assert slope == pytest.approx((gradient @ direction).item(), rel=0.01, abs=0.003 * gradient.norm().item())


def test_elbo_s_gradient_is_the_slope_of_its_loss_with_an_unconditional_pass_for_each_adapter(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the release's image models: v, v_old and v_ref are each guided by a pass of their own, the trained one with a
    gradient through both branches; guidance divides the likelihoods."""
    guidance = 3.0
    path = tmp_path / "tiny.yaml"
    path.write_text(
        tiny_config(sampling={"steps": 3}, group={"size": 3, "shard": 3}, model={"guidance": guidance}).to_yaml()
    )
    keys = ["learner.step_fraction=1.0", "learner.updates_per_iteration=1", "learner.kl.weight=0.5", "credit.scale=0.1"]
    config = load_config(path, overrides=["method=elbo", *keys])
    learner = Learner(config)
    adapter, old = (moved(learner.adapter(), name) for name in ("trained", "old"))
    learner.restore(replace(learner.state(), adapter=adapter, old=old))
    gradient, groups = gradient_of(config, learner, old, monkeypatch)
    policy, lora = build_policy(config, device="cpu")

    def velocities(group: ScoredGroup, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The guided velocities of the loaded adapter, and x0(v) - x0, float64."""
        (shard,) = group.shards
        request, clean = shard.rollout.request, torch.from_numpy(shard.rollout.latents[:, -1].copy())
        key = {"seed": config.seed, "iteration": 0, "group": request.group, "step": k, "epoch": 0}
        noise = forward_noise(**key, members=range(len(clean)), shape=clean.shape[1:])
        sigma = policy.sigmas[k]
        x = (1 - sigma) * clean + sigma * noise
        toward, without = (
            policy.backbone.velocity(x, sigma.expand(len(x)), policy.backbone.encode(text)).double()
            for text in (request.prompt.text, request.prompt.negative)
        )
        v = without + guidance * (toward - without)
        return v, x - sigma * v - clean

    cells = [(group, k) for group in groups for k in range(3)]
    with torch.no_grad():
        lora.load(old)
        olds = [velocities(*cell)[1] for cell in cells]
        with lora.adapter_disabled():
            bases = [velocities(*cell)[0] for cell in cells]
        lora.load(adapter)
        errors = [velocities(*cell)[1] for cell in cells]

    def likelihood(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return -error.square().flatten(1).mean(1) / size.abs().flatten(1).mean(1) / guidance

    pulls = []
    for (group, _), now, then in zip(cells, errors, olds, strict=True):
        rewards = finals(group.shards[0])
        growth = likelihood(now, now) - likelihood(then, then)
        pulls.append(growth.exp() * (torch.from_numpy(rewards - rewards.mean()) / 0.1 - growth))
    assert torch.cat(pulls).std() > 0.01

    @torch.no_grad()
    def value() -> float:
        terms = []
        for cell, pull, size, base in zip(cells, pulls, errors, bases, strict=True):
            v, error = velocities(*cell)
            terms.append(-pull * likelihood(error, size) + 0.5 * (v - base).square().flatten(1).mean(1))
        return torch.cat(terms).mean().item()

    require_slopes(gradient, adapter, lora, value)
