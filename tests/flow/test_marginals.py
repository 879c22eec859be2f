"""The Gaussian world, where every velocity is known: what each kernel does to the spread, sigma by sigma.

A kernel's step is linear in the state there, so the variance after it follows from the variance before; 100,000 samples
must agree within their own error. A world of one single picture (spread 0) shows whether a kernel keeps the marginal:
there x = (1 - sigma) x0 + sigma e exactly, so its spread must be sigma.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from flow.gaussian import gaussian_velocity
from flow.schedule import sd3_sigmas
from flow.transition import Transition, cps, dance_sde, ddim_sde, flow_sde, ode

SAMPLES, MEAN, STEPS = 100_000, 0.7, 10
SIGMAS = sd3_sigmas(steps=STEPS)
KERNELS: dict[str, Callable[..., Transition]] = {
    "flow_sde": partial(flow_sde, sigma_first=SIGMAS[1].item(), noise_level=0.7),
    "dance_sde": partial(dance_sde, noise_level=0.3),
    "ddim_sde": partial(ddim_sde, sigma_first=SIGMAS[1].item(), noise_level=0.7),
    "cps": partial(cps, noise_level=0.7),
    "ode": ode,
}


def walk(name: str, spread: float) -> Iterator[tuple[int, torch.Tensor]]:
    """k and the samples at sigma_{k+1}."""
    generator = torch.Generator().manual_seed(11)
    latents = torch.randn(SAMPLES, 1, generator=generator)
    for k in range(STEPS):
        sigma, sigma_next = SIGMAS[k].expand(SAMPLES), SIGMAS[k + 1].expand(SAMPLES)
        velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=spread)
        transition = KERNELS[name](latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next)
        latents = transition.sample(torch.randn(SAMPLES, 1, generator=generator))
        yield k, latents


def predicted(name: str, spread: float) -> list[float]:
    """Variance at sigma_1 ... sigma_T, from the papers' formulas in float64 and plain algebra."""
    grid, variance, variances = SIGMAS.double().tolist(), 1.0, []
    for k in range(STEPS):
        t, after = grid[k], grid[k + 1]
        t_clamped, h = (grid[1] if t == 1 else t), t - after
        total = (1 - t) ** 2 * spread**2 + t**2
        clean, noise = (1 - t) * spread**2 / total, t / total  # slopes of E[x0 | x] and E[x1 | x]
        if name in ("flow_sde", "dance_sde"):
            diffusion = 0.49 * t / (1 - t_clamped) if name == "flow_sde" else 0.09
            slope, std = 1 - h * (noise - clean + diffusion / (2 * t) * noise), math.sqrt(diffusion * h)
        elif name == "ode":
            slope, std = 1 - h * (noise - clean), 0.0
        else:
            std = 0.7 * after * math.sqrt(1 - t_clamped) if name == "ddim_sde" else after * math.sin(0.35 * math.pi)
            slope = (1 - after) * clean + math.sqrt(after**2 - std**2) * noise
        variance = slope**2 * variance + std**2
        variances.append(variance)
    return variances


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("name", KERNELS)
def test_the_variance_at_every_sigma_is_the_predicted_one(name: str, spread: float) -> None:
    expected = predicted(name, spread)
    for k, latents in walk(name, spread):
        error = 4 * math.sqrt(2 / SAMPLES) * expected[k] + 1e-9
        assert latents.var().item() == pytest.approx(expected[k], abs=error), k


@pytest.mark.parametrize("name", ["ddim_sde", "cps", "ode"])
def test_kernels_that_preserve_the_schedule_s_noise_keep_the_marginal_of_a_single_picture(name: str) -> None:
    for k, latents in walk(name, 0.0):
        sigma = SIGMAS[k + 1].item()
        assert latents.std().item() == pytest.approx(sigma, abs=4 * sigma / math.sqrt(2 * SAMPLES) + 1e-6), k
        assert latents.mean().item() == pytest.approx((1 - sigma) * MEAN, abs=4 * sigma / math.sqrt(SAMPLES) + 1e-6)


def test_flow_sde_overshoots_at_the_doubly_shifted_schedule_s_second_last_step() -> None:
    """Drawn from the right marginal at sigma_8 = 0.278, the noise after the step is 0.240 where 0.0089 is wanted."""
    generator = torch.Generator().manual_seed(12)
    t, after = SIGMAS[8], SIGMAS[9]
    latents = (1 - t) * MEAN + t * torch.randn(SAMPLES, 1, generator=generator)
    sigma, sigma_next = t.expand(SAMPLES), after.expand(SAMPLES)
    velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=0.0)
    for name, expected in (("flow_sde", 0.2400), ("ddim_sde", 0.008929), ("cps", 0.008929)):
        transition = KERNELS[name](latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next)
        drawn = transition.sample(torch.randn(SAMPLES, 1, generator=generator))
        assert drawn.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * SAMPLES) + 1e-3), name


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_the_score_sdes_approach_the_data_s_spread_as_steps_grow(name: str) -> None:
    samples, generator = 20_000, torch.Generator().manual_seed(13)

    def spread(steps: int) -> float:
        grid = torch.linspace(1, 0, steps + 1)
        kernels = KERNELS | {"flow_sde": partial(flow_sde, sigma_first=grid[1].item(), noise_level=0.7)}
        latents = torch.randn(samples, 1, generator=generator)
        for k in range(steps):
            sigma, sigma_next = grid[k].expand(samples), grid[k + 1].expand(samples)
            velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=0.5)
            kernel = ode if k == steps - 1 else kernels[name]
            step = kernel(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next)
            latents = step.sample(torch.randn(samples, 1, generator=generator))
        return latents.std().item()

    assert spread(200) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * samples) + 0.006)
