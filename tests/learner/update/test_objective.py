"""The objective on the tiny pipeline: the reference is the base model, pairs without a step reward cost nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flow.adapter.lora import Lora
from flow.maths.noise import normal
from flow.maths.transition import Transition
from flow.models.load import load_backbone
from flow.policy import FlowPolicy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from learner.update.metrics import PieceStatistics, StepStatistics, update_metrics
from learner.update.micro_batches import MicroBatch
from learner.update.objective import Objective, divergence, norm_excess
from protocol.config.learning import KlConfig, LearnerConfig
from protocol.config.run import RunConfig
from protocol.messages import LearnerState, Prompt
from tests.support.learning.gradients import relative_difference, watch_gradients
from tests.support.learning.groups import draw_groups, iterate, learn

Config = Callable[..., RunConfig]
GAINS = {"rule": "gains"}
PROMPT = Prompt(index=0, text="a red circle", negative="photo")


def perturbed(config: RunConfig, amount: float) -> tuple[FlowPolicy, Lora]:
    backbone = load_backbone(config.model)
    lora = Lora(backbone.transformer, config.model.lora, seed=0)
    with torch.no_grad():
        for index, parameter in enumerate(lora.parameters.values()):
            parameter.add_(amount * normal("perturbed", index, shape=parameter.shape))
    return FlowPolicy(backbone, config.sampling, guidance=config.model.guidance), lora


def pairs(policy: FlowPolicy, k: int = 1) -> MicroBatch:
    latents = normal("latents", shape=(3, 4, 8, 8))
    conditioning = policy.conditioning(PROMPT.text, PROMPT.negative)
    with torch.no_grad():
        transition, _ = policy.transition(latents, k, conditioning=conditioning)
    following = transition.sample(normal("noise", shape=(3, 4, 8, 8)))
    return MicroBatch(
        prompt=PROMPT,
        k=k,
        latents=latents,
        next_latents=following,
        old_log_prob=transition.log_prob(following),
        advantages=torch.tensor([1.0, -0.5, 0.0]),
        valid=torch.tensor([True, True, False]),
        old_mean=transition.mean,
    )


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("rule", ["full", "no_dt", "velocity"])
def test_a_fresh_adapter_has_a_kl_of_exactly_zero(tiny_config: Config, rule: str, guidance: float) -> None:
    policy, lora = perturbed(tiny_config(model={"guidance": guidance}), 0.0)
    objective = Objective(policy, lora, LearnerConfig(kl=KlConfig(weight=1.0, rule=rule)))  # type: ignore[arg-type]
    assert objective(pairs(policy)).kl.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_reference_is_the_guided_base_model_and_the_adapter_is_back_afterwards(
    tiny_config: Config, guidance: float
) -> None:
    config = tiny_config(model={"guidance": guidance})
    policy, lora = perturbed(config, 0.1)
    base = FlowPolicy(load_backbone(config.model), config.sampling, guidance=guidance)
    micro_batch = pairs(policy)
    conditioning = policy.conditioning(PROMPT.text, PROMPT.negative)
    with torch.no_grad():
        ours, velocity = policy.transition(micro_batch.latents, 1, conditioning=conditioning)
        with lora.adapter_disabled():
            disabled, _ = policy.transition(micro_batch.latents, 1, conditioning=conditioning)
        theirs, plain = base.transition(micro_batch.latents, 1, conditioning=base.conditioning("a red circle", "photo"))
        again, _ = policy.transition(micro_batch.latents, 1, conditioning=conditioning)
    assert torch.equal(disabled.mean, theirs.mean)
    assert torch.equal(again.mean, ours.mean)
    assert not torch.equal(ours.mean, theirs.mean)
    assert all(parameter.requires_grad for parameter in lora.parameters.values())
    step = (policy.sigmas[1] - policy.sigmas[2]).item()
    expected = {
        "full": ((ours.mean - theirs.mean) ** 2).flatten(1).mean(1) / (2 * ours.std**2),
        "no_dt": ((ours.mean - theirs.mean) ** 2).flatten(1).mean(1) / (2 * ours.std**2) * step,
        "velocity": ((velocity - plain) ** 2).flatten(1).mean(1),
    }
    for rule, value in expected.items():
        kl = divergence(
            KlConfig(weight=1.0, rule=rule),  # type: ignore[arg-type]
            policy=(ours, velocity),
            reference=(theirs, plain),
            step_size=step,
        )
        torch.testing.assert_close(kl, value)
        objective = Objective(policy, lora, LearnerConfig(kl=KlConfig(weight=2.0, rule=rule)))  # type: ignore[arg-type]
        losses = objective(micro_batch)
        torch.testing.assert_close(losses.kl, torch.where(micro_batch.valid, value, 0.0))
        without = Objective(policy, lora, LearnerConfig())(micro_batch)
        torch.testing.assert_close(losses.loss, without.loss + 2.0 * losses.kl)


def test_the_kl_alone_pulls_the_adapter_back(tiny_config: Config) -> None:
    """With advantages of 0 the gradient is the KL's: it is there, and a step against it lowers the KL."""
    policy, lora = perturbed(tiny_config(), 0.05)
    micro_batch = pairs(policy)
    micro_batch.advantages.zero_()
    objective = Objective(policy, lora, LearnerConfig(kl=KlConfig(weight=1.0)))
    before = objective(micro_batch)
    before.loss.sum().backward()
    gradients = [parameter.grad for parameter in lora.parameters.values()]
    assert all(gradient is not None for gradient in gradients)
    assert sum(gradient.abs().sum().item() for gradient in gradients if gradient is not None) > 0
    with torch.no_grad():
        for parameter in lora.parameters.values():
            assert parameter.grad is not None
            parameter.sub_(1e-4 * parameter.grad)
    assert objective(micro_batch).kl.sum() < before.kl.sum()


@pytest.mark.parametrize("rule", ["full", "no_dt", "velocity"])
def test_the_reference_s_forward_leaves_no_graph_and_the_policy_s_does(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    policy, lora = perturbed(tiny_config(), 0.1)
    micro_batch, plain, seen = pairs(policy), policy.transition, []

    def watched(*state: Any, **how: Any) -> tuple[Transition, torch.Tensor]:
        transition, velocity = plain(*state, **how)
        seen.append((torch.is_grad_enabled(), transition.mean.requires_grad, velocity.requires_grad))
        return transition, velocity

    monkeypatch.setattr(policy, "transition", watched)
    losses = Objective(policy, lora, LearnerConfig(kl=KlConfig(weight=1.0, rule=rule)))(micro_batch)  # type: ignore[arg-type]
    assert seen == [(False, False, False), (True, True, True)]
    assert losses.loss.requires_grad


@pytest.mark.parametrize("objective", ["clipped", "guarded", "masked"])
def test_pairs_without_a_step_reward_cost_nothing(tiny_config: Config, objective: str) -> None:
    policy, lora = perturbed(tiny_config(), 0.1)
    losses = Objective(policy, lora, LearnerConfig(objective=objective, kl=KlConfig(weight=1.0)))(pairs(policy))  # type: ignore[arg-type]
    assert losses.ratio.tolist() == [1.0, 1.0, 1.0]
    assert losses.loss[2].item() == 0.0
    assert losses.loss[0].item() != 0.0


def test_the_mask_sees_how_far_the_means_of_the_step_have_moved(tiny_config: Config) -> None:
    """The rollout's means lie two stds away: D = 2 in nats per element, and the ratio says which way the pair moved."""
    policy, lora = perturbed(tiny_config(), 0.1)
    micro_batch = pairs(policy)
    assert micro_batch.old_mean is not None
    far = replace(
        micro_batch,
        old_mean=micro_batch.old_mean + 2 * policy.std(micro_batch.k),
        old_log_prob=micro_batch.old_log_prob - torch.tensor([0.3, 0.3, 0.0]),
    )
    for bound, gradients in ((1.9, [False, True]), (2.1, [True, True])):
        losses = Objective(policy, lora, LearnerConfig(objective="masked", divergence_bound=bound))(far)
        assert losses.loss.tolist() == pytest.approx([-math.exp(0.3), 0.5 * math.exp(0.3), 0.0], rel=1e-4)
        assert losses.outside.tolist() == [bound < 2] * 3
        for loss, has_gradient in zip(losses.loss, gradients, strict=False):
            found = torch.autograd.grad(loss, list(lora.parameters.values()), retain_graph=True)
            assert any(bool(each.any()) for each in found) is has_gradient


def test_several_epochs_go_over_the_groups_again(tiny_config: Config) -> None:
    config = tiny_config(learner={"updates_per_iteration": 2, "epochs": 3, "learning_rate": 1e-3})
    learner, policy = Learner(config), RolloutPolicy(config)
    metrics = iterate(learner, policy, config)
    steps = {float(value) for name, value in learner.state().optimizer.items() if name.endswith("/step")}
    assert steps == {6.0}
    assert metrics["train/ratio_mean"] != 1.0


def test_parts_of_a_group_add_up_to_the_gradient_of_the_whole(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard of four or four of one: the same pairs, the same mean, the same gradient up to rounding."""
    gradients = watch_gradients(monkeypatch)
    for shard in (4, 1):
        config = tiny_config(group={"size": 4, "shard": shard, "per_iteration": 1}, sampling={"shared_noise": False})
        learner, policy = Learner(config), RolloutPolicy(config)
        policy.receive(learner.adapter())

        def by_member(rollout: Any, images: np.ndarray) -> np.ndarray:
            rewards = np.zeros(len(images))
            for member in range(rollout.request.members):
                rewards[rollout.image_index[member]] = np.arange(4) * (rollout.request.first_member + member)
            return rewards

        learn(config, draw_groups(policy, config, learner.adapter(), iteration=0, judge=by_member), learner)
    whole, parts = gradients
    assert whole.norm() > 0
    assert relative_difference(whole, parts) < 1e-4


def test_baseline_and_running_mean_go_on_exactly_after_a_restore(tiny_config: Config) -> None:
    learning = {"updates_per_iteration": 1, "average": {"decay": 0.9, "every": 3}}
    config = tiny_config(learner=learning, credit={"normalise": "ema"})
    whole, policy = Learner(config), RolloutPolicy(config)
    iterate(whole, policy, config)
    halfway = whole.state()
    assert halfway.average is not None
    assert halfway.average.digest == Learner(config).adapter().digest, "the mean moves after two optimizer steps"
    resumed = Learner(config)
    resumed.restore(halfway)
    for learner in (whole, resumed):
        other = RolloutPolicy(config)
        iterate(learner, other, config)
        iterate(learner, other, config)
    first, second = whole.state(), resumed.state()
    assert first.adapter.digest == second.adapter.digest
    assert first.average is not None
    assert second.average is not None
    assert first.average.digest == second.average.digest != first.adapter.digest
    assert first.baseline == second.baseline
    assert len(first.baseline) == 4
    assert first.baseline[3] is None, "the last step is never stochastic"


def test_the_mean_kl_is_that_of_the_pairs_that_count(tiny_config: Config) -> None:
    policy, lora = perturbed(tiny_config(), 0.1)
    micro_batch = pairs(policy)
    found = Objective(policy, lora, LearnerConfig(kl=KlConfig(weight=2.0)))(micro_batch).detached()
    piece = PieceStatistics.of((0, 0, 0), found, found.loss.sum().item())
    metrics = update_metrics([piece], [StepStatistics(pairs=2, grad_norm=1.0)])
    assert micro_batch.valid.tolist() == [True, True, False]
    assert metrics["train/reference_kl"] == pytest.approx(found.kl[:2].mean().item())
    assert (found.kl[:2] > 0).all()


def test_norm_guard_s_hinge_is_the_one_worked_by_hand_and_spares_shorter_velocities() -> None:
    """Lengths .8602325 and .7211103 over sqrt(2); their difference .1391223 likewise."""
    long, short = torch.tensor([[0.5, 0.7]], requires_grad=True), torch.tensor([[0.4, 0.6]])
    excess, ratio = norm_excess(long, short)
    assert excess.item() == pytest.approx(0.1391223 / 2**0.5, abs=1e-6)
    assert ratio.item() == pytest.approx(0.8602325 / 0.7211103, abs=1e-6)
    (slope,) = torch.autograd.grad(excess.sum(), long)
    assert slope[0].tolist() == pytest.approx([0.5 / 0.8602325 / 2**0.5, 0.7 / 0.8602325 / 2**0.5], abs=1e-6)
    assert norm_excess(short, long)[0].item() == 0.0


@pytest.mark.parametrize("objective", ["clipped", "elbo"])
def test_norm_guard_keeps_velocities_shorter(tiny_config: Config, objective: str) -> None:
    """Every velocity of this adapter is longer than the base model's; a large weight shortens them."""
    ratios = {}
    for weight in (1e-9, 1e4):
        settings = {"learning_rate": 0.02, "updates_per_iteration": 1, "objective": objective, "norm_guard": weight}
        config = tiny_config(learner=settings)
        learner, policy = Learner(config), RolloutPolicy(config)
        for _ in range(3):
            ratios[weight] = iterate(learner, policy, config)["train/velocity_norm_ratio_mean"]
    assert ratios[1e4] < ratios[1e-9]


def test_a_fork_begins_with_its_adapter_as_old(tiny_config: Config) -> None:
    """Its state of iteration 0 has an adapter only; the learner may have trained before."""
    settings: dict[str, Any] = {"objective": "nft", "kl": {"weight": 0.1, "rule": "velocity"}}
    config = tiny_config(learner=settings | {"updates_per_iteration": 1, "learning_rate": 1e-2})
    learner, policy = Learner(config), RolloutPolicy(config)
    iterate(learner, policy, config)
    trained = learner.state().adapter
    learner.restore(LearnerState(iteration=0, adapter=replace(trained, version=0), optimizer={}))
    state = learner.state()
    assert state.old is not None
    assert state.old.digest == trained.digest == state.adapter.digest
    assert iterate(learner, RolloutPolicy(config), config)["train/reference_kl"] > 0
