"""Objectives of the forward process: formulas by hand, against numpy and by differences; rollouts and resumes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploy.presets import load_config
from flow.maths.noise import INITIAL, forward_noise, trajectory_noise
from flow.models.families import ATTENTION
from flow.policy import build_policy
from flow.rollout import RolloutPolicy
from learner.checkpoint import read_checkpoint, write_checkpoint
from learner.update.ema import OldAdapter
from learner.update.forward import (
    adjoint_matching,
    clipped_matching,
    likelihood,
    likelihood_loss,
    negative_aware,
    preference_weight,
    robust_matching,
)
from learner.update.lanes import Seat
from learner.update.learner import Learner
from learner.update.metrics import update_metrics
from protocol.config.learning import OldConfig
from protocol.config.run import RunConfig
from protocol.errors import ContractError, ParityError
from protocol.messages import Adapter, Rollout, digest_of
from tests.support.learning.groups import draw_groups, iterate, learn

Config = Callable[..., RunConfig]

CLEAN, NOISE = np.array([1.0, -1.0]), np.array([0.5, 2.0])
SIGMA = 0.4
OLD, NEW = np.array([-1.0, 2.0]), np.array([-0.5, 2.5])


def row(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values[None])


def worked_nft(velocity: np.ndarray, *, optimality: float, beta: float) -> tuple[float, np.ndarray]:
    """Loss and gradient of the pair that docs/method/objectives.md works out."""
    trained = row(velocity).requires_grad_()
    loss = negative_aware(
        velocity=trained,
        old_velocity=row(OLD),
        noised=row((1 - SIGMA) * CLEAN + SIGMA * NOISE),
        clean=row(CLEAN),
        sigma=torch.tensor([SIGMA], dtype=torch.float64),
        optimality=torch.tensor([optimality], dtype=torch.float64),
        beta=beta,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), trained)
    return loss.item(), gradient[0].numpy()


@pytest.mark.parametrize(("beta", "loss"), [(1.0, 0.28), (0.1, 3.245982)])
def test_nft_is_the_pair_worked_by_hand(beta: float, loss: float) -> None:
    assert worked_nft(NEW, optimality=0.75, beta=beta)[0] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_at_the_old_velocity_nft_s_gradient_is_advantage_weighted_matching(beta: float) -> None:
    """(2r - 1) (2 sigma^2 / (w D)) (v - (x1 - x0)): the paper's direction, whatever beta is."""
    _, gradient = worked_nft(OLD, optimality=0.75, beta=beta)
    assert gradient == pytest.approx([-0.133333, -0.266667], abs=1e-6)
    for r in (0.0, 0.3, 0.5, 1.0):
        _, gradient = worked_nft(OLD, optimality=r, beta=beta)
        expected = (2 * r - 1) * 2 * SIGMA**2 / (0.3 * 2) * (OLD - (NOISE - CLEAN))
        assert gradient == pytest.approx(expected, abs=1e-9)


def test_awm_is_the_pair_worked_by_hand() -> None:
    matching = torch.tensor([np.mean((NEW - (NOISE - CLEAN)) ** 2)])
    assert matching.item() == pytest.approx(0.125)
    held = robust_matching(matching, sigma=torch.tensor([SIGMA], dtype=torch.float64), power=0.25)
    assert held.item() == pytest.approx(0.946306, abs=1e-6)
    plain = robust_matching(matching, sigma=torch.tensor([SIGMA], dtype=torch.float64), power=1.0)
    assert plain.item() == pytest.approx(0.05, abs=1e-9)


def test_a_group_s_weight_is_the_one_worked_by_hand() -> None:
    """Both members are preferred already: the good one's loss has fallen by .02, the bad one's risen by .02."""
    case = {
        "matching": torch.tensor([0.10, 0.30, 9.0], dtype=torch.float64),
        "reference": torch.tensor([0.12, 0.28, 0.0], dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64),
        "valid": torch.tensor([True, True, False]),
    }
    assert preference_weight(**case, beta=100.0).item() == pytest.approx(0.119203, abs=1e-6)
    swapped = {**case, "advantages": -case["advantages"]}
    assert preference_weight(**swapped, beta=100.0).item() == pytest.approx(1 - 0.119203, abs=1e-6)
    nobody = {**case, "valid": torch.zeros(3, dtype=torch.bool)}
    assert preference_weight(**nobody, beta=100.0).item() == 0.5


PAIR: dict[str, list[float]] = {
    "clean": [0.2, -0.4],
    "noise": [1.0, 0.5],
    "velocity": [0.5, 0.7],
    "old": [0.6, 0.8],
    "reference": [0.4, 0.6],
}
"""The pair that docs/method/objectives.md works out for `elbo` and `ram`, at sigma .6 with A = .05."""


def worked(name: str) -> torch.Tensor:
    return torch.tensor([PAIR[name]], dtype=torch.float64)


def likelihood_of(velocity: torch.Tensor, *, guidance: float = 1.0) -> torch.Tensor:
    noised = 0.4 * worked("clean") + 0.6 * worked("noise")
    sigma = torch.tensor([0.6], dtype=torch.float64)
    return likelihood(velocity=velocity, noised=noised, clean=worked("clean"), sigma=sigma, guidance=guidance)


def test_the_likelihood_of_a_finished_image_is_the_one_worked_by_hand_and_guidance_divides_it() -> None:
    told = [likelihood_of(worked(name)).item() for name in ("velocity", "old", "reference")]
    assert told == pytest.approx([-0.156, -0.1, -0.2142857], abs=1e-7)
    assert likelihood_of(worked("velocity"), guidance=4.0).item() == pytest.approx(-0.039)
    assert likelihood_of(worked("velocity").float()).dtype == torch.float64


@pytest.mark.parametrize(
    ("rule", "has_ratio", "loss", "gradient"),
    [
        ("epg", True, 0.0073752, [-0.0340394, -0.0226929]),
        ("epg", False, 0.0078, [-0.036, -0.024]),
        ("pepg", True, 0.0156354, [-0.0721635, -0.0481090]),
        ("pepg", False, 0.0165360, [-0.0763200, -0.0508800]),
        ("par", True, 0.0053120, [-0.0721635, -0.0481090]),
        ("par", False, 0.0056180, [-0.0763200, -0.0508800]),
    ],
)
def test_policy_gradients_of_the_likelihood_are_those_worked_by_hand(
    rule: str, has_ratio: bool, loss: float, gradient: list[float]
) -> None:
    """The release's functions give the same numbers."""
    trained = worked("velocity").requires_grad_()
    own, old = likelihood_of(trained), likelihood_of(worked("old"))
    advantages = torch.tensor([0.05], dtype=torch.float64)
    held = likelihood_loss(own, old=old, advantages=advantages, rule=rule, has_ratio=has_ratio)
    assert held.item() == pytest.approx(loss, abs=5e-8)
    (slope,) = torch.autograd.grad(held.sum(), trained)
    assert slope[0].tolist() == pytest.approx(gradient, abs=5e-8)


def test_adjoint_matching_is_the_pair_worked_by_hand() -> None:
    trained = worked("velocity").requires_grad_()
    held = adjoint_matching(
        velocity=trained,
        old_velocity=worked("old"),
        reference=worked("reference"),
        target=worked("noise") - worked("clean"),
        advantages=torch.tensor([0.05], dtype=torch.float64),
    )
    assert held.item() == pytest.approx(0.0085625)
    (slope,) = torch.autograd.grad(held.sum(), trained)
    assert slope[0].tolist() == pytest.approx([0.09, 0.095])


def test_a_matching_loss_that_has_moved_far_enough_for_its_advantage_has_no_gradient() -> None:
    """exp(l_old - l) is 1.02, .98, 1.005 and .98: with c = .01 the first is done for A > 0, the second for A <= 0."""
    matching = (torch.tensor([0.1] * 4) - torch.tensor([1.02, 0.98, 1.005, 0.98]).log()).requires_grad_()
    how = {"old": torch.full((4,), 0.1), "clip_range": 0.01}
    held, is_clipped = clipped_matching(matching, advantages=torch.tensor([1.0, -1.0, 1.0, 1.0]), **how)
    assert is_clipped.tolist() == [True, True, False, False]
    assert torch.equal(held, matching)
    assert torch.autograd.grad(held.sum(), matching)[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    _, is_clipped = clipped_matching(matching, advantages=torch.tensor([-1.0, 0.0, -1.0, 0.0]), **how)
    assert is_clipped.tolist() == [False, True, False, True]


def oracle_nft(v: np.ndarray, weights: tuple[float, float], case: dict[str, Any]) -> float:
    """The loss in numpy with given denominators."""
    positive = (1 - case["beta"]) * case["old"] + case["beta"] * v
    negative = (1 + case["beta"]) * case["old"] - case["beta"] * v
    errors = [case["noised"] - case["sigma"] * each - case["clean"] for each in (positive, negative)]
    r = case["optimality"]
    terms = [np.mean(error**2) / weight for error, weight in zip(errors, weights, strict=True)]
    return (r * terms[0] + (1 - r) * terms[1]) / case["beta"]


def denominators(v: np.ndarray, case: dict[str, Any]) -> tuple[float, float]:
    shift = case["beta"] * (v - case["old"])
    held = [
        np.mean(np.abs(case["noised"] - case["sigma"] * (case["old"] + s) - case["clean"])) for s in (shift, -shift)
    ]
    return float(held[0]), float(held[1])


def test_nft_and_its_gradient_are_numpy_s_over_random_pairs() -> None:
    random = np.random.default_rng(5)
    for _ in range(50):
        shape = (3, 2, 2)
        case: dict[str, Any] = {name: random.normal(size=shape) for name in ("old", "noised", "clean")}
        case |= {"sigma": random.uniform(0.05, 1), "optimality": random.uniform(), "beta": random.uniform(0.05, 1)}
        velocity = case["old"] + 0.3 * random.normal(size=shape)
        trained = row(velocity).requires_grad_()
        loss = negative_aware(
            velocity=trained,
            old_velocity=row(case["old"]),
            noised=row(case["noised"]),
            clean=row(case["clean"]),
            sigma=torch.tensor([case["sigma"]], dtype=torch.float64),
            optimality=torch.tensor([case["optimality"]], dtype=torch.float64),
            beta=case["beta"],
        )
        weights = denominators(velocity, case)
        assert loss.item() == pytest.approx(oracle_nft(velocity, weights, case), rel=1e-10)
        (gradient,) = torch.autograd.grad(loss.sum(), trained)
        direction = random.normal(size=shape)
        step = 1e-5
        ends = [oracle_nft(velocity + sign * step * direction, weights, case) for sign in (1, -1)]
        assert float((gradient[0].numpy() * direction).sum()) == pytest.approx(
            (ends[0] - ends[1]) / (2 * step), rel=1e-5
        )


def test_awm_and_its_slope_are_numpy_s_over_random_pairs() -> None:
    random = np.random.default_rng(6)
    for _ in range(50):
        loss, sigma, power = random.uniform(0.01, 4), random.uniform(0.05, 1), random.uniform(0.1, 1)

        def oracle(value: float, sigma: float = sigma, power: float = power) -> float:
            return sigma * ((value + 1e-10) ** power - 1e-10**power) / power

        matching = torch.tensor([loss], dtype=torch.float64, requires_grad=True)
        held = robust_matching(matching, sigma=torch.tensor([sigma], dtype=torch.float64), power=power)
        assert held.item() == pytest.approx(oracle(loss), rel=1e-10)
        (slope,) = torch.autograd.grad(held.sum(), matching)
        step = 1e-6 * loss
        assert slope.item() == pytest.approx((oracle(loss + step) - oracle(loss - step)) / (2 * step), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "decays"),
    [
        ({"rate": 0.001, "most": 0.5}, {1: 0.001, 100: 0.1, 500: 0.5, 5000: 0.5}),
        ({"rate": 0.0075, "flat": 75, "most": 0.999}, {1: 0.0, 75: 0.0, 100: 0.1875, 500: 0.999}),
    ],
)
def test_the_old_adapter_follows_by_the_released_schedules(config: dict[str, Any], decays: dict[int, float]) -> None:
    for steps, decay in decays.items():
        parameter = torch.nn.Parameter(torch.zeros(2))
        old = OldAdapter({"a": parameter}, OldConfig(**config))
        with torch.no_grad():
            parameter.fill_(1.0)
        old.update(steps)
        assert old.tensors["a"].tolist() == pytest.approx([1 - decay] * 2, abs=1e-6)


def forward(tiny_config: Config, method: str, tmp_path: Path, *overrides: str, **sections: Any) -> RunConfig:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config(**{"sampling": {"steps": 4}, **sections}).to_yaml())
    return load_config(path, overrides=[f"method={method}", "sampling.window={rule: all}", *overrides])


METHODS = ("diffusion_nft", "awm")
EVERY = (*METHODS, "dgpo", "dgpo_ema", "elbo", "ram")


def fast(method: str) -> tuple[str, ...]:
    """So that `old` differs from the trained adapter after one iteration; `awm` also weighs the difference."""
    old = (f"learner.old.{key}" for key in ("rate=0.5", "flat=0", "most=0.5", f"weight={int(method == 'awm')}"))
    return ("learner.learning_rate=0.05", *old)


def first_shard(policy: RolloutPolicy, config: RunConfig, adapter: Adapter) -> Rollout:
    policy.receive(adapter)
    return draw_groups(policy, config, adapter, iteration=0)[0].shards[0].rollout


def test_dgpo_rolls_out_the_trained_adapter_first_and_then_the_old_one(tiny_config: Config, tmp_path: Path) -> None:
    """After 500 optimizer steps in the release; here after one. A resumed learner rolls out the same."""
    config = forward(
        tiny_config, "dgpo", tmp_path, *fast("dgpo"), "learner.old.rolls_out_after=1", "learner.probe_every=1"
    )
    learner, policy = Learner(config), RolloutPolicy(config)
    for is_old in (False, True, True):
        told = iterate(learner, policy, config)
        assert told["probe/latent_deviation"] == 0.0
        state, resumed = learner.state(), Learner(config)
        resumed.restore(state)
        assert state.old is not None
        assert state.old.digest != state.adapter.digest
        held = {learner.adapter().digest, resumed.adapter().digest}
        assert held == {(state.old if is_old else state.adapter).digest}
    assert {"train/clipped_mean", "train/group_weight_mean", "train/velocity_norm_ratio_mean"} <= told.keys()


def test_an_ode_rollout_carries_clean_latents_only(tiny_config: Config, tmp_path: Path) -> None:
    """They are those of Euler's steps from the keyed noise, and take a T-th of the bytes."""
    config = forward(tiny_config, "diffusion_nft", tmp_path)
    learner, policy = Learner(config), RolloutPolicy(config)
    rollout = first_shard(policy, config, learner.adapter())
    assert rollout.latents.shape == (2, 1, 4, 8, 8)
    assert rollout.steps == (0, 1, 2, 3)
    assert (rollout.log_probs, rollout.means) == (None, None)
    assert rollout.image_index.shape == (2, 1)
    own, _ = build_policy(config, device="cpu")
    latents = trajectory_noise(seed=7, iteration=0, group=0, members=range(2), step=INITIAL, shape=(4, 8, 8))
    conditioning = own.conditioning("a red circle", "")
    with torch.no_grad():
        for k in range(4):
            velocity = own.velocity(latents, own.sigmas[k].expand(2), conditioning)
            latents = latents - (own.sigmas[k] - own.sigmas[k + 1]) * velocity
    np.testing.assert_allclose(rollout.latents[:, 0], latents.numpy(), atol=1e-5)


def test_the_noise_of_training_is_its_own_for_every_key() -> None:
    key: dict[str, Any] = {
        "seed": 1,
        "iteration": 2,
        "group": 3,
        "members": [4],
        "step": 5,
        "epoch": 0,
        "shape": (1, 2, 2),
    }
    base = forward_noise(**key)
    assert torch.equal(forward_noise(**key), base)
    changed = [{"seed": 2}, {"iteration": 1}, {"group": 2}, {"members": [5]}, {"step": 4}, {"epoch": 1}]
    assert not any(torch.equal(forward_noise(**{**key, **other}), base) for other in changed)
    rollouts = trajectory_noise(**{name: value for name, value in key.items() if name != "epoch"})
    assert not torch.equal(rollouts, base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_with_other_tensors_is_that_of_a_policy_that_loaded_them(tiny_config: Config, dtype: str) -> None:
    config = tiny_config(model={"dtype": dtype})
    (policy, lora), (other, other_lora) = (build_policy(config, device="cpu") for _ in range(2))
    fresh = lora.export(version=0)
    arrays = {name: array + 0.1 for name, array in fresh.arrays.items()}
    other_lora.load(Adapter(version=0, arrays=arrays, digest=digest_of(arrays)))
    latents, sigma = torch.ones(2, 4, 8, 8), torch.full((2,), 0.5)
    conditioning = policy.conditioning("a red circle", "")
    with torch.no_grad():
        before = policy.velocity(latents, sigma, conditioning)
        with lora.holding({name: torch.from_numpy(array) for name, array in arrays.items()}):
            swapped = policy.velocity(latents, sigma, conditioning)
        assert torch.equal(swapped, other.velocity(latents, sigma, other.conditioning("a red circle", "")))
        assert not torch.equal(swapped, before)
        assert torch.equal(policy.velocity(latents, sigma, conditioning), before)
    assert lora.export(version=0).digest == fresh.digest


def test_nft_rolls_out_the_old_adapter_and_awm_the_trained_one(tiny_config: Config, tmp_path: Path) -> None:
    for method in METHODS:
        config = forward(tiny_config, method, tmp_path, *fast(method))
        learner, policy = Learner(config), RolloutPolicy(config)
        metrics = iterate(learner, policy, config)
        state = learner.state()
        assert state.old is not None
        assert state.old.digest != state.adapter.digest
        assert learner.adapter().digest == (state.old if method == "diffusion_nft" else state.adapter).digest
        assert metrics["probe/latent_deviation"] == 0.0
        assert not any("ratio" in name or "clip" in name or "approx" in name for name in metrics)
        assert metrics["train/old_distance_mean"] == 0.0, "old and trained are one adapter at first"
        again = iterate(learner, policy, config)
        assert again["train/old_distance_mean"] > 0
        spread = "train/optimality_std" if method == "diffusion_nft" else "train/matching_std"
        assert again[spread] > 0


@pytest.mark.parametrize("method", [*EVERY[:2], *(pytest.param(each, marks=pytest.mark.whole) for each in EVERY[2:])])
def test_training_raises_the_reward(tiny_config: Config, tmp_path: Path, method: str) -> None:
    """The same keyed rollouts, before and after three iterations; a wrong sign would lower their reward."""
    targets = f"model.lora.targets={list(ATTENTION)}"
    overrides = (targets, "learner.learning_rate=0.02", "learner.max_grad_norm=10")
    config = forward(tiny_config, method, tmp_path, *overrides, group={"size": 8, "shard": 8, "per_iteration": 4})
    learner, policy = Learner(config), RolloutPolicy(config)

    def reward() -> float:
        adapter = learner.state().adapter
        policy.receive(adapter)
        groups = draw_groups(policy, config, adapter, iteration=0)
        return float(np.mean([shard.scores.values for group in groups for shard in group.shards]))

    before = reward()
    for _ in range(3):
        iterate(learner, policy, config)
    after = reward()
    assert after > before + 0.0003, (before, after)


@pytest.mark.parametrize("method", EVERY)
def test_a_resumed_learner_goes_on_to_the_same_bits(tiny_config: Config, tmp_path: Path, method: str) -> None:
    config = forward(tiny_config, method, tmp_path, *fast(method))
    whole, policy = Learner(config), RolloutPolicy(config)
    iterate(whole, policy, config)
    folder = write_checkpoint(tmp_path, whole.state(), config.model.lora, keep=1)
    iterate(whole, policy, config)
    resumed = Learner(config)
    resumed.restore(read_checkpoint(folder))
    iterate(resumed, RolloutPolicy(config), config)
    one, other = whole.state(), resumed.state()
    assert one.old is not None
    assert other.old is not None
    assert (one.adapter.digest, one.old.digest) == (other.adapter.digest, other.old.digest)
    with pytest.raises(ContractError, match="resumes with its adapter `old`, got a state without one"):
        resumed.restore(replace(one, old=None))


def test_workers_whose_old_adapters_differ_are_refused(tiny_config: Config, tmp_path: Path) -> None:
    config = forward(tiny_config, "diffusion_nft", tmp_path, *fast("diffusion_nft"))
    workers, policy = [Learner(config, seat=Seat(at, 2)) for at in range(2)], RolloutPolicy(config)
    adapter = workers[0].adapter()
    policy.receive(adapter)
    state = workers[1].state()
    assert state.old is not None
    arrays = {name: array + 1e-3 for name, array in state.old.arrays.items()}
    workers[1].restore(replace(state, old=replace(state.old, arrays=arrays, digest=digest_of(arrays))))
    with pytest.raises(ContractError, match="all learner workers must hold the same adapter after an update"):
        learn(config, draw_groups(policy, config, adapter, iteration=0), *workers)


@pytest.mark.parametrize("method", EVERY)
def test_the_probe_stops_a_rollout_of_another_adapter(tiny_config: Config, tmp_path: Path, method: str) -> None:
    config = forward(tiny_config, method, tmp_path)
    learner, policy = Learner(config), RolloutPolicy(config)
    own = learner.adapter()
    arrays = {name: array + 0.05 for name, array in own.arrays.items()}
    other = Adapter(version=0, arrays=arrays, digest=digest_of(arrays))
    policy.receive(other)
    with pytest.raises(ParityError, match="must agree on clean latents to learner.probe_bound 0.0001"):
        learn(config, draw_groups(policy, config, other, iteration=0), learner)


def test_a_rollout_without_log_probs_holds_clean_latents_only(tiny_config: Config, tmp_path: Path) -> None:
    config = forward(tiny_config, "diffusion_nft", tmp_path)
    rollout = first_shard(RolloutPolicy(config), config, Learner(config).adapter())
    with pytest.raises(ContractError, match="latents without log_probs must be the clean ones only, got 2 points"):
        replace(rollout, latents=np.repeat(rollout.latents, 2, axis=1))


def test_an_update_without_densities_tells_nothing_of_ratios() -> None:
    assert "train/clip_fraction" in update_metrics([], [])
    told = update_metrics([], [], has_ratios=False)
    assert set(told) == {"train/loss", "train/grad_norm", "train/reference_kl"}
