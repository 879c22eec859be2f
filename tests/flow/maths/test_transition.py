"""A transition against torch.distributions, and the ODE against its exact map; `test_kernels.py` has the kernels."""

import pytest
import torch

from flow.maths.schedule import linear_sigmas
from flow.maths.transition import Start, Transition, ode
from tests.support.worlds.gaussian import gaussian_velocity

MEAN, SPREAD = 0.7, 0.5
"""Of the data in the Gaussian world."""


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


def scalar_case() -> Start:
    """x = 0.5, v = -0.3, t = 0.8 -> 0.6; x0 = 0.74, x1 = 0.44."""
    return Start(one(0.5), one(-0.3), torch.tensor([0.8]), torch.tensor([0.6]))


def test_ode_gives_the_number_worked_by_hand() -> None:
    transition = ode(scalar_case())
    assert transition.mean.item() == pytest.approx(0.56, abs=1e-7)
    assert transition.std.item() == 0.0
    assert transition.mean.dtype == transition.std.dtype == torch.float32


def test_log_prob_is_the_normal_s_averaged_over_latent_elements() -> None:
    generator = torch.Generator().manual_seed(3)
    mean, value = (torch.randn(5, 4, 3, 2, generator=generator) for _ in range(2))
    std = torch.tensor([0.02, 0.1, 0.5, 1.0, 3.0])
    log_prob = Transition(mean=mean, std=std).log_prob(value)
    oracle = torch.distributions.Normal(mean.double(), std.double().view(-1, 1, 1, 1)).log_prob(value.double())
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob, oracle.mean((1, 2, 3)).float(), rtol=2e-6, atol=2e-6)


def test_log_prob_sends_gradient_to_the_mean_and_none_to_the_sample() -> None:
    mean, value = torch.zeros(1, 2, requires_grad=True), torch.tensor([[0.3, -0.1]], requires_grad=True)
    Transition(mean=mean, std=torch.tensor([0.5])).log_prob(value).sum().backward()
    assert mean.grad is not None
    assert mean.grad.tolist() == [pytest.approx([0.3 / 0.25 / 2, -0.1 / 0.25 / 2])]
    assert value.grad is None


def test_sample_is_mean_plus_std_times_noise() -> None:
    transition = Transition(mean=torch.tensor([[1.0], [2.0]]), std=torch.tensor([0.5, 0.0]))
    assert transition.sample(torch.tensor([[2.0], [9.0]])).tolist() == [[2.0], [2.0]]


def test_ode_sampling_approaches_the_exact_map_of_the_gaussian_world() -> None:
    """The exact flow carries noise x_1 to mean + spread x_1."""
    noise = torch.linspace(-2, 2, 9).unsqueeze(1)

    def worst_error(steps: int) -> float:
        sigmas, latents = linear_sigmas(steps=steps), noise
        for k in range(steps):
            sigma, sigma_next = sigmas[k].expand(9), sigmas[k + 1].expand(9)
            velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=SPREAD)
            latents = ode(Start(latents, velocity, sigma, sigma_next)).mean
        return (latents - (MEAN + SPREAD * noise)).abs().max().item()

    coarse, fine = worst_error(50), worst_error(400)
    assert fine < 0.004
    assert coarse / fine == pytest.approx(8, rel=0.1), "Euler's error falls with the step"
