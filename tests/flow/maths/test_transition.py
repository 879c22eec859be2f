"""Kernels against numbers worked by hand, torch.distributions and a world whose distribution is known exactly."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from flow.maths.schedule import linear_sigmas, sd3_sigmas
from flow.maths.transition import Start, Transition, ddim_sde, flow_sde, ode
from tests.support.worlds.gaussian import gaussian_velocity

MEAN, SPREAD = 0.7, 0.5
"""Of the data in the Gaussian world."""


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


def scalar_case() -> Start:
    """x = 0.5, v = -0.3, t = 0.8 -> 0.6; x0 = 0.74, x1 = 0.44."""
    return Start(one(0.5), one(-0.3), torch.tensor([0.8]), torch.tensor([0.6]))


@pytest.mark.parametrize(
    ("kernel", "mean", "std", "log_prob"),
    [(flow_sde, 0.452200, 0.626099, -0.529014), (ddim_sde, 0.546731, 0.187830, 0.420351)],
)
def test_kernels_give_the_numbers_worked_by_hand(
    kernel: Callable[..., Transition], mean: float, std: float, log_prob: float
) -> None:
    transition = kernel(scalar_case(), sigma_first=0.9, noise_level=0.7)
    assert transition.mean.item() == pytest.approx(mean, abs=1e-6)
    assert transition.std.item() == pytest.approx(std, abs=1e-6)
    assert transition.log_prob(one(0.7)).item() == pytest.approx(log_prob, abs=2e-6)


def test_ode_gives_the_number_worked_by_hand() -> None:
    transition = ode(scalar_case())
    assert transition.mean.item() == pytest.approx(0.56, abs=1e-7)
    assert transition.std.item() == 0.0


def test_both_kernels_become_the_ode_as_noise_vanishes() -> None:
    for kernel in (flow_sde, ddim_sde):
        transition = kernel(scalar_case(), sigma_first=0.9, noise_level=1e-4)
        assert transition.mean.item() == pytest.approx(0.56, abs=1e-6)


def stds(kernel: Callable[..., Transition], sigma_first: float) -> list[float]:
    sigmas = sd3_sigmas(steps=10)
    nothing = torch.zeros(10, 1)
    start = Start(nothing, nothing, sigmas[:-1], sigmas[1:])
    return kernel(start, sigma_first=sigma_first, noise_level=0.7).std.tolist()


def test_flow_sde_has_the_published_stds_on_the_sd3_schedule() -> None:
    table = stds(flow_sde, sd3_sigmas(steps=10)[1].item())
    assert [table[k] for k in (0, 1, 3, 5, 7, 8, 9)] == pytest.approx(
        [0.7000, 0.7430, 0.4459, 0.3528, 0.2820, 0.2254, 0.0063], abs=5.1e-5
    )


def test_ddim_sde_has_the_published_stds_and_clamps_the_first_step() -> None:
    table = stds(ddim_sde, sd3_sigmas(steps=10)[1].item())
    assert [table[k] for k in (0, 1, 3, 5, 7, 8, 9)] == pytest.approx(
        [0.1342, 0.1277, 0.2087, 0.2281, 0.1424, 0.0053, 0.0], abs=5.1e-5
    )


def test_literal_ddim_sde_is_deterministic_at_sigma_one() -> None:
    assert stds(ddim_sde, 1.0)[0] == 0.0


def test_each_sample_has_its_own_sigma() -> None:
    case = (
        torch.tensor([[0.5], [0.1]]),
        torch.tensor([[-0.3], [0.2]]),
        torch.tensor([0.8, 1.0]),
        torch.tensor([0.6, 0.9]),
    )
    for kernel in (flow_sde, ddim_sde):
        both = kernel(Start(*case), sigma_first=0.9, noise_level=0.7)
        for row in (0, 1):
            alone = kernel(Start(*(value[row : row + 1] for value in case)), sigma_first=0.9, noise_level=0.7)
            assert torch.equal(both.mean[row], alone.mean[0])
            assert torch.equal(both.std[row], alone.std[0])


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


def test_results_stay_float32() -> None:
    for kernel in (
        partial(flow_sde, sigma_first=0.9, noise_level=0.7),
        partial(ddim_sde, sigma_first=0.9, noise_level=0.7),
        ode,
    ):
        transition = kernel(scalar_case())
        assert transition.mean.dtype == transition.std.dtype == torch.float32


def sampled(kernel: Callable[..., Transition], *, steps: int, samples: int = 40_000) -> torch.Tensor:
    """Samples of the Gaussian world, drawn from noise by `kernel` over a linear grid; the last step is the ODE's."""
    generator = torch.Generator().manual_seed(5)
    sigmas = linear_sigmas(steps=steps)
    latents = torch.randn(samples, 1, generator=generator)
    for k in range(steps):
        sigma, sigma_next = sigmas[k].expand(samples), sigmas[k + 1].expand(samples)
        velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=SPREAD)
        step = ode if k == steps - 1 else kernel
        transition = step(Start(latents, velocity, sigma, sigma_next))
        latents = transition.sample(torch.randn(samples, 1, generator=generator))
    return latents


@pytest.mark.parametrize(("kernel", "noise_level"), [(flow_sde, 0.7), (ddim_sde, 0.2)])
def test_stochastic_sampling_reproduces_the_data_s_mean_and_spread(
    kernel: Callable[..., Transition], noise_level: float
) -> None:
    steps = 200
    first = linear_sigmas(steps=steps)[1].item()
    latents = sampled(partial(kernel, sigma_first=first, noise_level=noise_level), steps=steps)
    standard_error = SPREAD / math.sqrt(len(latents))
    assert latents.mean().item() == pytest.approx(MEAN, abs=4 * standard_error + 0.005)
    assert latents.std().item() == pytest.approx(SPREAD, abs=4 * standard_error + 0.005)


def test_one_ddim_step_contracts_the_variance_by_exactly_the_predicted_amount() -> None:
    """Var x' = Var[(1-t') E[x_0|x] + k E[x_1|x]] + std^2 with k^2 = t'^2 - std^2; both means are linear in x."""
    t, following, count = 0.6, 0.5, 400_000
    generator = torch.Generator().manual_seed(6)
    variance = (1 - t) ** 2 * SPREAD**2 + t**2
    latents = (1 - t) * MEAN + math.sqrt(variance) * torch.randn(count, 1, generator=generator)
    sigma, sigma_next = torch.full((count,), t), torch.full((count,), following)
    velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=SPREAD)
    transition = ddim_sde(Start(latents, velocity, sigma, sigma_next), sigma_first=0.9, noise_level=0.7)
    drawn = transition.sample(torch.randn(count, 1, generator=generator))
    std = 0.7 * following * math.sqrt(1 - t)
    kept = math.sqrt(following**2 - std**2)
    slope = (1 - following) * (1 - t) * SPREAD**2 / variance + kept * t / variance
    assert drawn.var().item() == pytest.approx(slope**2 * variance + std**2, rel=0.01)
    assert drawn.mean().item() == pytest.approx((1 - following) * MEAN, abs=0.004)


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
