"""Sigma grids against diffusers' scheduler and against numbers worked by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from flow.maths.schedule import (
    flux2_sigmas,
    flux_sigmas,
    linear_sigmas,
    sd3_sigmas,
    shifted_sigmas,
    z_image_sigmas,
)


def scheduled(steps: int | list[float], *, mu: float | None = None, **settings: Any) -> torch.Tensor:
    """What the scheduler makes of a number of steps, or of the sigmas that a pipeline hands it."""
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    if isinstance(steps, int):
        scheduler.set_timesteps(steps)
    else:
        scheduler.set_timesteps(sigmas=steps, mu=mu)
    assert isinstance(scheduler.sigmas, torch.Tensor)
    return scheduler.sigmas


def even(steps: int) -> list[float]:
    return np.linspace(1.0, 1 / steps, steps).tolist()


@pytest.mark.parametrize("shift", [1.0, 2.5, 3.0, 5.0])
def test_sd3_sigmas_equal_the_scheduler_s_bitwise(shift: float) -> None:
    for steps in range(1, 51):
        sigmas = sd3_sigmas(steps=steps, shift=shift)
        assert sigmas.dtype == torch.float32
        assert torch.equal(sigmas, scheduled(steps, shift=shift)), f"{steps} steps"


def test_sd3_sigmas_equal_the_scheduler_s_for_another_training_length() -> None:
    expected = scheduled(12, shift=3.0, num_train_timesteps=500)
    assert torch.equal(sd3_sigmas(steps=12, train_timesteps=500), expected)


def test_ten_sd3_sigmas_are_the_published_ones() -> None:
    expected = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
    assert sd3_sigmas(steps=10).tolist() == pytest.approx(expected, abs=5e-7)


def test_linear_sigmas_run_evenly_from_one_to_exactly_zero() -> None:
    sigmas = linear_sigmas(steps=4)
    assert sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert sigmas.dtype == torch.float32


def test_six_flux_sigmas_of_512_pixels_are_the_published_ones() -> None:
    """1024 tokens: mu = 0.63."""
    expected = [1, 0.903736, 0.789705, 0.652489, 0.484218, 0.273003, 0]
    assert flux_sigmas(steps=6, tokens=1024).tolist() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(("pixels", "mu"), [(512, 0.63), (1024, 1.15)])
def test_the_middle_of_two_flux_steps_shows_the_published_shift(pixels: int, mu: float) -> None:
    """At u = 1/2 sigma is e^mu / (e^mu + 1), whose logit is mu."""
    sigmas = flux_sigmas(steps=2, tokens=(pixels // 16) ** 2)
    assert torch.logit(sigmas[1].double()).item() == pytest.approx(mu, abs=1e-6)


@pytest.mark.parametrize("pixels", [256, 512, 1024])
def test_flux_sigmas_equal_the_scheduler_s_bitwise(pixels: int) -> None:
    tokens = (pixels // 16) ** 2
    for steps in (1, 4, 6, 28):
        expected = scheduled(even(steps), mu=calculate_shift(tokens), use_dynamic_shifting=True)
        assert torch.equal(flux_sigmas(steps=steps, tokens=tokens), expected), f"{steps} steps"


@pytest.mark.parametrize(("tokens", "mu"), [(1024, 2.044976), (5000, 1.303017)])
def test_the_middle_of_two_flux2_steps_shows_its_shift(tokens: int, mu: float) -> None:
    """1024 tokens: m(10) = 1.987811, m(200) = 0.629999, mu = m(10) + 8 / 190 (m(10) - m(200)); 5000: mu = m(200)."""
    sigmas = flux2_sigmas(steps=2, tokens=tokens)
    assert torch.logit(sigmas[1].double()).item() == pytest.approx(mu, abs=1e-5)


def test_qwen_image_s_grid_stretches_flux_s_to_its_last_sigma() -> None:
    """e^mu = 1 at u = 1, 2/3, 1/3: 1 - sigma = 0, 1/3, 2/3 becomes 0, 0.49, 0.98."""
    flat = flux_sigmas(steps=3, tokens=256, base_shift=0.0, last=0.02)
    assert flat.tolist() == pytest.approx([1, 0.51, 0.02, 0], abs=1e-6)
    assert flux_sigmas(steps=3, tokens=256, base_shift=0.0)[2].item() == pytest.approx(1 / 3)


def test_z_image_s_grid_is_even_sigmas_shifted_by_six() -> None:
    assert z_image_sigmas(steps=2).tolist() == pytest.approx([1, 6 * 0.5 / (1 + 5 * 0.5), 0])


@pytest.mark.parametrize("steps", [1, 4, 10, 16, 25])
def test_a_grid_shifted_once_is_what_the_scheduler_makes_of_even_sigmas(steps: int) -> None:
    torch.testing.assert_close(shifted_sigmas(steps=steps), scheduled(even(steps), shift=3.0), rtol=0, atol=1e-7)


def test_a_grid_shifted_once_ends_with_a_large_step() -> None:
    sigmas = shifted_sigmas(steps=10).tolist()
    assert (sigmas[1], sigmas[9]) == (pytest.approx(0.964286, abs=1e-6), pytest.approx(0.25))
    assert (sigmas[0], sigmas[10]) == (1.0, 0.0)
