"""The clipped surrogate by hand: both signs of the advantage, both sides of the clip."""

import math
from functools import partial
from typing import get_args

import pytest
import torch

from flow.maths.transition import Transition
from learner.update.objective import (
    clipped_surrogate,
    divergence,
    guarded_log_ratio,
    guarded_surrogate,
    masked_surrogate,
)
from protocol.config.learning import KlConfig

CLIP = 0.1


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.05, 2.0, -2.1, -2.1),
        (1.5, 2.0, -2.2, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.8, 0.0),
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_are_those_worked_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    """d loss / d log_prob is -A rho where the surrogate is not clipped, else 0."""
    log_prob = torch.tensor([math.log(ratio) - 0.4], requires_grad=True)
    value, rho = clipped_surrogate(
        log_prob - torch.tensor([-0.4]), advantages=torch.tensor([advantage]), clip_range=CLIP
    )
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert rho.item() == pytest.approx(ratio, abs=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "divergence", "slope"),
    [
        (1.5, 2.0, 0.02, 0.0),
        (0.5, -2.0, 0.02, 0.0),
        (0.5, 2.0, 0.02, -1.0),
        (1.5, -2.0, 0.02, 3.0),
        (1.5, 2.0, 0.005, -3.0),
        (0.5, -2.0, 0.005, 1.0),
        (1.0, 2.0, 0.02, -2.0),
        (1.5, 2.0, 0.01, -3.0),
    ],
)
def test_the_mask_stops_pairs_that_moved_too_far_and_would_move_on(
    ratio: float, advantage: float, divergence: float, slope: float
) -> None:
    """With tau = 0.01: a pair on its way back, or within tau, keeps the gradient -A rho, however far its ratio is."""
    log_prob = torch.tensor([math.log(ratio) - 0.4], requires_grad=True)
    value, rho = masked_surrogate(
        log_prob - torch.tensor([-0.4]),
        advantages=torch.tensor([advantage]),
        divergence=torch.tensor([divergence]),
        bound=0.01,
    )
    value.sum().backward()
    assert value.item() == pytest.approx(-advantage * ratio, abs=1e-6)
    assert rho.item() == pytest.approx(ratio, abs=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(slope, abs=1e-6)


def test_equal_log_probs_have_a_ratio_of_exactly_one_and_an_unclipped_gradient() -> None:
    log_prob = torch.tensor([0.420351, -0.529014], requires_grad=True)
    loss, ratio = clipped_surrogate(log_prob - log_prob.detach(), advantages=torch.tensor([1.5, -0.5]), clip_range=1e-5)
    loss.sum().backward()
    assert ratio.tolist() == [1.0, 1.0]
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-1.5, 0.5])


def test_the_loss_s_gradient_is_that_of_finite_differences() -> None:
    """In float64, away from the clip's corners; through log-prob, ratio, clip and the Gaussian's mean."""
    generator = torch.Generator().manual_seed(3)
    mean, old_mean, noise = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(3))
    mean = (old_mean + 0.02 * mean).requires_grad_()
    std = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    value = old_mean + std.view(-1, 1) * noise
    old = Transition(mean=old_mean, std=std).log_prob(value)
    advantages = torch.tensor([1.5, -0.7, 0.3, -2.0], dtype=torch.float64)

    def plain(at: torch.Tensor) -> torch.Tensor:
        log_prob = Transition(mean=at, std=std).log_prob(value)
        return clipped_surrogate(log_prob - old, advantages=advantages, clip_range=0.3)[0].sum()

    def guarded(at: torch.Tensor) -> torch.Tensor:
        log_prob = Transition(mean=at, std=std).log_prob(value)
        log_ratio = guarded_log_ratio(log_prob - old, mean=at, old_mean=old_mean, std=std)
        return guarded_surrogate(log_ratio, advantages=advantages, clip_range=0.3, step_size=0.1)[0].sum()

    def unmasked(at: torch.Tensor) -> torch.Tensor:
        new = Transition(mean=at, std=std)
        distance = Transition(mean=old_mean, std=std).kl(new)
        return masked_surrogate(new.log_prob(value) - old, advantages=advantages, divergence=distance, bound=1.0)[
            0
        ].sum()

    def towards_reference(rule: str, at: torch.Tensor) -> torch.Tensor:
        return divergence(
            KlConfig(rule=rule),  # type: ignore[arg-type]
            policy=(Transition(mean=at, std=std), at),
            reference=(Transition(mean=old_mean, std=std), old_mean),
            step_size=0.1,
        ).sum()

    divergences = [partial(towards_reference, rule) for rule in get_args(KlConfig.model_fields["rule"].annotation)]
    for loss in (plain, guarded, unmasked, *divergences):
        assert torch.autograd.gradcheck(loss, (mean,), eps=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(loss(mean), mean)
        assert gradient.abs().sum() > 0


def test_where_the_clip_binds_finite_differences_see_no_slope_either() -> None:
    """Two pairs have gone too far the way their advantage wants, two the other way; these alone still move the mean."""
    value = torch.tensor([[0.3, -0.2], [-0.1, 0.4], [0.2, 0.2], [-0.3, 0.1]], dtype=torch.float64)
    std = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    old = Transition(mean=torch.zeros_like(value), std=std).log_prob(value)
    mean = (0.1 * value).requires_grad_()
    advantages = torch.tensor([1.5, -0.7, 0.3, -2.0], dtype=torch.float64)

    def loss(at: torch.Tensor) -> torch.Tensor:
        log_prob = Transition(mean=at, std=std).log_prob(value)
        return clipped_surrogate(log_prob - old, advantages=advantages, clip_range=1e-3)[0].sum()

    assert torch.autograd.gradcheck(loss, (mean,), eps=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss(mean), mean)
    assert (gradient != 0).any(1).tolist() == [False, True, False, True]


def test_where_the_mask_binds_a_pair_has_no_gradient_and_the_others_have_their_own() -> None:
    """Two pairs are too far and would move on, for either sign of the advantage; one comes back; one is within tau.

    A masked pair keeps its value, so differences of the loss itself would see a slope that training must not see.
    """
    value = torch.tensor([[0.3, -0.2], [-0.1, 0.4], [0.2, 0.2], [-0.3, 0.1]], dtype=torch.float64)
    std = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    before = Transition(mean=torch.zeros_like(value), std=std)
    old = before.log_prob(value)
    mean = (torch.tensor([[0.1], [-0.1], [0.2], [0.05]], dtype=torch.float64) * value).requires_grad_()
    advantages = torch.tensor([1.5, -0.7, -0.3, 2.0], dtype=torch.float64)

    def masked(at: torch.Tensor) -> torch.Tensor:
        new = Transition(mean=at, std=std)
        distance = before.kl(new)
        return masked_surrogate(new.log_prob(value) - old, advantages=advantages, divergence=distance, bound=0.001)[0]

    distances = before.kl(Transition(mean=mean, std=std)).tolist()
    assert distances == pytest.approx([0.008125, 0.00265625, 0.00222222, 0.00009766], abs=1e-8)
    (gradient,) = torch.autograd.grad(masked(mean).sum(), mean)
    assert gradient[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (gradient[2:] != 0).all()

    def trained(rows: torch.Tensor) -> torch.Tensor:
        return masked(torch.cat([mean[:2].detach(), rows]))[2:]

    assert torch.autograd.gradcheck(trained, (mean[2:].detach().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_the_guarded_log_ratio_is_the_mean_of_drift_times_noise() -> None:
    """What remains of the log-ratio once its negative bias and its 1 / std are taken out."""
    generator = torch.Generator().manual_seed(5)
    drift, noise, old_mean = (torch.randn(3, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    std = torch.tensor([0.05, 0.3, 0.7], dtype=torch.float64)
    mean, value = old_mean + 0.01 * drift, old_mean + std.view(-1, 1) * noise
    log_ratio = guarded_log_ratio(
        Transition(mean=mean, std=std).log_prob(value) - Transition(mean=old_mean, std=std).log_prob(value),
        mean=mean,
        old_mean=old_mean,
        std=std,
    )
    torch.testing.assert_close(log_ratio, (0.01 * drift * noise).mean(1))


def test_the_guarded_loss_is_the_clipped_one_of_its_ratio_divided_by_the_step_size() -> None:
    """The worked number of docs/method/objectives.md: d = 2, q = .5, noise (.5, -1), A = 2, c = .01, h = .25; the mean
    has not moved yet, and has moved by (.04, -.02)."""
    old_mean, noise = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([0.5, -1.0], dtype=torch.float64)
    drift = torch.tensor([[0.0, 0.0], [0.04, -0.02]], dtype=torch.float64)
    std = torch.tensor([0.5, 0.5], dtype=torch.float64)
    value = old_mean + 0.5 * noise
    log_prob = Transition(mean=old_mean + drift, std=std).log_prob(value).requires_grad_()
    plain = log_prob - Transition(mean=old_mean, std=std).log_prob(value)
    assert plain.tolist() == pytest.approx([0.0, 0.038])
    log_ratio = guarded_log_ratio(plain, mean=old_mean + drift, old_mean=old_mean, std=std)
    assert log_ratio.tolist() == pytest.approx([0.0, 0.02])
    loss, ratio = guarded_surrogate(
        log_ratio, advantages=torch.tensor([2.0, 2.0], dtype=torch.float64), clip_range=0.01, step_size=0.25
    )
    assert ratio.tolist() == pytest.approx([1.0, 1.020201])
    assert loss.tolist() == pytest.approx([-8.0, -8.08])
    loss.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-4.0, 0.0])


def test_a_small_drift_moves_the_log_ratio_as_theory_says() -> None:
    """Why clip ranges are small: log rho ~ N(-delta^2 / 2, delta^2 / d) for a drift of delta stds over d elements."""
    d, delta, samples = 65_536, 0.01, 64
    generator = torch.Generator().manual_seed(7)
    old = Transition(mean=torch.full((samples, d), 0.3), std=torch.full((samples,), 0.25))
    value = old.sample(torch.randn(samples, d, generator=generator)).double()
    new = Transition(mean=old.mean + delta * 0.25, std=old.std)
    log_ratio = new.log_prob(value) - old.log_prob(value)
    assert log_ratio.mean().item() == pytest.approx(-5e-5, abs=4 * 3.9e-5 / math.sqrt(samples))
    assert log_ratio.std().item() == pytest.approx(3.9e-5, rel=0.4)
