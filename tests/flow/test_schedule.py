"""Sigma grids against diffusers' scheduler and against numbers worked by hand."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flow.schedule import linear_sigmas, sd3_sigmas


@pytest.mark.parametrize("shift", [1.0, 2.5, 3.0, 5.0])
def test_sd3_sigmas_equal_the_scheduler_s_bitwise(shift: float) -> None:
    for steps in range(1, 51):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        sigmas = sd3_sigmas(steps=steps, shift=shift)
        assert sigmas.dtype == torch.float32
        assert torch.equal(sigmas, scheduler.sigmas), f"{steps} steps"


def test_sd3_sigmas_equal_the_scheduler_s_for_another_training_length() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, num_train_timesteps=500)
    scheduler.set_timesteps(12)
    assert torch.equal(sd3_sigmas(steps=12, train_timesteps=500), scheduler.sigmas)


def test_ten_sd3_sigmas_are_the_published_ones() -> None:
    expected = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
    assert sd3_sigmas(steps=10).tolist() == pytest.approx(expected, abs=5e-7)


def test_linear_sigmas_run_evenly_from_one_to_exactly_zero() -> None:
    sigmas = linear_sigmas(steps=4)
    assert sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert sigmas.dtype == torch.float32
