"""The Gaussian world, where every velocity is known: what each kernel does to the spread, sigma by sigma.

A kernel's step is linear in the state there, so the variance after it follows from the variance before; 100,000 samples
must agree within their own error. The moments can be carried without samples too, so that fine grids show what stays of
the marginal's spread in the limit. A world of one single image (spread 0) shows whether a kernel keeps the marginal:
there x = (1 - sigma) x0 + sigma e exactly, so its spread must be sigma.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from flow.maths.schedule import sd3_sigmas
from flow.maths.transition import Start, Transition, cps, dance_sde, ddim_sde, flow_sde, ode
from tests.support.worlds.gaussian import gaussian_velocity

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
        transition = KERNELS[name](Start(latents, velocity, sigma, sigma_next))
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
def test_kernels_that_preserve_the_schedule_s_noise_keep_the_marginal_of_a_single_image(name: str) -> None:
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
        transition = KERNELS[name](Start(latents, velocity, sigma, sigma_next))
        drawn = transition.sample(torch.randn(SAMPLES, 1, generator=generator))
        assert drawn.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * SAMPLES) + 1e-3), name


def carried(name: str, spread: float, grid: torch.Tensor, *, ends_as_ode: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance at sigma_1 ... sigma_T without a sample: the kernel's own slope, offset and std, in float64."""
    grid = grid.double()
    first = {"sigma_first": grid[1].item()} if name in ("flow_sde", "ddim_sde") else {}

    def step(kernel: Callable[..., Transition], latents: torch.Tensor) -> Transition:
        velocity = gaussian_velocity(latents=latents, sigma=grid[:-1], mean=MEAN, spread=spread)
        return kernel(Start(latents, velocity, grid[:-1], grid[1:]))

    zeros, ones = torch.zeros(len(grid) - 1, 1).double(), torch.ones(len(grid) - 1, 1).double()
    mean, variance, moments = 0.0, 1.0, []
    kernel = partial(KERNELS[name], **first)
    offsets, levels, stds = step(kernel, zeros).mean, step(kernel, ones).mean, step(kernel, zeros).std
    if ends_as_ode:
        offsets[-1], levels[-1], stds[-1] = step(ode, zeros).mean[-1], step(ode, ones).mean[-1], 0.0
    for offset, level, std in zip(offsets[:, 0].tolist(), levels[:, 0].tolist(), stds.tolist(), strict=True):
        slope = level - offset
        mean, variance = slope * mean + offset, slope**2 * variance + std**2
        moments.append((mean, variance))
    means, variances = torch.tensor(moments, dtype=torch.float64).T
    return means, variances


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("name", KERNELS)
def test_carrying_the_moments_is_exact(name: str, spread: float) -> None:
    _, variances = carried(name, spread, SIGMAS, ends_as_ode=False)
    assert variances.tolist() == pytest.approx(predicted(name, spread), rel=1e-9, abs=1e-15)


def excess(name: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Even sigmas below 1, and by how much the variance there is off the marginal's, (1 - s)^2 spread^2 + s^2."""
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    means, variances = carried(name, 0.5, grid, ends_as_ode=True)
    sigmas = grid[1:]
    torch.testing.assert_close(means, (1 - sigmas) * MEAN, rtol=0, atol=1e-12)
    return sigmas, variances / ((1 - sigmas).square() * 0.5**2 + sigmas.square()) - 1


@pytest.mark.parametrize(("name", "worst"), [("dance_sde", 0.0249), ("ode", 0.0292)])
def test_dance_sde_and_the_ode_keep_every_marginal_in_the_limit_of_small_steps(name: str, worst: float) -> None:
    for steps in (100, 200, 400, 800):
        assert excess(name, steps)[1].abs().max().item() == pytest.approx(worst * 100 / steps, rel=0.02), steps


def test_flow_sde_keeps_the_late_marginals_but_the_noise_of_its_clamped_first_steps_stays() -> None:
    """On an even grid the first two steps each add noise of variance a^2 = 0.49, however small the steps are."""
    early = (1 - 0.49 / 2) ** 2 * (1 + 0.49**2 / 4) + 0.49 - 1
    assert early == pytest.approx(0.0942, abs=1e-4)
    for steps, late in ((100, 0.0167), (200, 0.0120), (400, 0.0086), (800, 0.0061)):
        sigmas, off = excess("flow_sde", steps)
        assert off[sigmas <= 0.25].abs().max().item() == pytest.approx(late, abs=1e-4), steps
        assert off.abs().argmax().item() == 1, "behind the second step"
        assert off[1].item() == pytest.approx(early, abs=1.2 / steps), steps


@pytest.mark.parametrize(("name", "lost"), [("ddim_sde", -0.133), ("cps", -0.280)])
def test_kernels_whose_noise_does_not_shrink_with_the_step_lose_spread_however_small_it_is(
    name: str, lost: float
) -> None:
    ends = [excess(name, steps)[1][-1].item() for steps in (400, 800)]
    assert ends[1] == pytest.approx(lost, abs=5e-4)
    assert abs(ends[0] - ends[1]) < 0.005, "the limit is not 0"
