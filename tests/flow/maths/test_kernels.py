"""Every kernel by worked numbers: Dance-SDE and CPS, the std of every step, both log-probs, the closed-form KL."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from flow.maths.schedule import sd3_sigmas
from flow.maths.transition import Start, Transition, cps, dance_sde, ddim_sde, flow_sde, ode

FIRST = 0.9
KERNELS: dict[str, Callable[..., Transition]] = {
    "flow_sde": partial(flow_sde, sigma_first=FIRST, noise_level=0.7),
    "dance_sde": partial(dance_sde, noise_level=0.3),
    "ddim_sde": partial(ddim_sde, sigma_first=FIRST, noise_level=0.7),
    "cps": partial(cps, noise_level=0.7),
}


def scalar_case(velocity: float = -0.3) -> Start:
    """x = 0.5, v = -0.3, t = 0.8 -> 0.6; x0 = 0.74, x1 = 0.44."""
    return Start(torch.tensor([[0.5]]), torch.tensor([[velocity]]), torch.tensor([0.8]), torch.tensor([0.6]))


@pytest.mark.parametrize(
    ("name", "mean", "std", "log_prob"),
    [
        ("flow_sde", 0.452200, 0.626099, -0.529014),
        ("dance_sde", 0.555050, 0.134164, 0.506128),
        ("ddim_sde", 0.546731, 0.187830, 0.420351),
        ("cps", 0.415853, 0.534604, -0.433960),
    ],
)
def test_the_scalar_case_gives_the_worked_numbers(name: str, mean: float, std: float, log_prob: float) -> None:
    transition = KERNELS[name](scalar_case())
    assert transition.mean.item() == pytest.approx(mean, abs=1e-6)
    assert transition.std.item() == pytest.approx(std, abs=1e-6)
    assert transition.log_prob(torch.tensor([[0.7]])).item() == pytest.approx(log_prob, abs=2e-6)


def test_the_published_log_prob_of_cps_is_minus_the_squared_distance() -> None:
    transition = cps(scalar_case(), noise_level=0.7)
    squared = Transition(mean=transition.mean, std=transition.std, log_prob_form="squared")
    assert squared.log_prob(torch.tensor([[0.7]])).item() == pytest.approx(-0.080739, abs=1e-6)


def test_the_published_log_prob_weighs_a_step_by_two_variances() -> None:
    """Its gradient is that of the Gaussian one times 2 std^2."""
    gradients = {}
    for form in ("gaussian", "squared"):
        mean = torch.tensor([[0.4, -0.2]], requires_grad=True)
        Transition(mean=mean, std=torch.tensor([0.3]), log_prob_form=form).log_prob(  # type: ignore[arg-type]
            torch.tensor([[0.7, 0.1]])
        ).sum().backward()
        assert mean.grad is not None
        gradients[form] = mean.grad
    torch.testing.assert_close(gradients["squared"], gradients["gaussian"] * 2 * 0.3**2)


TABLE = {
    "flow_sde": [0.7000, 0.7430, None, 0.4459, None, 0.3528, None, 0.2820, 0.2254, 0.0063],
    "dance_sde": [0.0599, 0.0649, None, 0.0778, None, 0.0973, None, 0.1297, 0.1556, 0.0283],
    "ddim_sde": [0.1342, 0.1277, None, 0.2087, None, 0.2281, None, 0.1424, 0.0053, 0.0],
    "cps": [0.8555, 0.8138, None, 0.7042, None, 0.5365, None, 0.2477, 0.0080, 0.0],
}


@pytest.mark.parametrize("name", TABLE)
def test_the_stds_on_the_ten_step_sd3_schedule_are_the_worked_ones(name: str) -> None:
    sigmas = sd3_sigmas(steps=10)
    first = {"sigma_first": sigmas[1].item()} if name in ("flow_sde", "ddim_sde") else {}
    nothing = torch.zeros(10, 1)
    transition = KERNELS[name](Start(nothing, nothing, sigmas[:-1], sigmas[1:]), **first)
    for k, expected in enumerate(TABLE[name]):
        if expected is not None:
            assert transition.std[k].item() == pytest.approx(expected, abs=5.1e-5), k


def test_literal_ddim_sde_is_deterministic_at_sigma_one() -> None:
    nothing = torch.zeros(1, 1)
    start = Start(nothing, nothing, torch.ones(1), torch.tensor([0.9]))
    assert ddim_sde(start, sigma_first=1.0, noise_level=0.7).std.item() == 0.0


def moved_by_rounding(name: str, k: int) -> float:
    """What bfloat16 takes from the log-prob of a state of 65,536 elements when it is rounded after it was drawn."""
    sigmas, generator = sd3_sigmas(steps=10), torch.Generator().manual_seed(9)
    latents, noise = (torch.randn(1, 65_536, generator=generator) for _ in range(2))
    transition = KERNELS[name](
        Start(latents, torch.zeros_like(latents), sigmas[k : k + 1], sigmas[k + 1 : k + 2]),
        sigma_first=sigmas[1].item(),
    )
    drawn = transition.sample(noise)
    return (transition.log_prob(drawn.bfloat16().float()) - transition.log_prob(drawn)).item()


def test_a_state_rounded_to_bfloat16_has_another_log_prob_than_the_one_that_was_drawn() -> None:
    """Why latents stay float32: the shift is beyond the smallest clip range, and huge where the std is small."""
    assert moved_by_rounding("ddim_sde", 8) == pytest.approx(-0.049, abs=0.002)
    assert max(abs(moved_by_rounding("flow_sde", k)) for k in range(8)) > 1e-5


@pytest.mark.parametrize("name", KERNELS)
def test_each_sample_has_its_own_sigma_and_all_stays_float32(name: str) -> None:
    case = (
        torch.tensor([[0.5], [0.1]]),
        torch.tensor([[-0.3], [0.2]]),
        torch.tensor([0.8, 1.0]),
        torch.tensor([0.6, 0.9]),
    )
    both = KERNELS[name](Start(*case))
    assert both.mean.dtype == both.std.dtype == torch.float32
    for row in (0, 1):
        alone = KERNELS[name](Start(*(value[row : row + 1] for value in case)))
        assert torch.equal(both.mean[row], alone.mean[0])
        assert torch.equal(both.std[row], alone.std[0])


@pytest.mark.parametrize("name", KERNELS)
def test_without_noise_a_kernel_is_the_ode(name: str) -> None:
    assert KERNELS[name](scalar_case(), noise_level=1e-4).mean.item() == pytest.approx(
        ode(scalar_case()).mean.item(), abs=1e-6
    )


@pytest.mark.parametrize("name", KERNELS)
def test_kl_is_that_of_two_gaussians_with_equal_std(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    latents, velocity, other = (torch.randn(3, 2, 5, generator=generator) for _ in range(3))
    sigma, sigma_next = torch.tensor([0.9, 0.6, 0.3]), torch.tensor([0.8, 0.4, 0.1])
    policy, reference = (KERNELS[name](Start(latents, each, sigma, sigma_next)) for each in (velocity, other))
    assert torch.equal(policy.std, reference.std)

    def gaussian(transition: Transition) -> torch.distributions.Normal:
        return torch.distributions.Normal(transition.mean.double(), transition.std.double().view(-1, 1, 1))

    oracle = torch.distributions.kl_divergence(gaussian(policy), gaussian(reference)).mean((1, 2)).float()
    torch.testing.assert_close(policy.kl(reference), oracle, rtol=1e-5, atol=1e-7)
    assert torch.equal(policy.kl(policy), torch.zeros(3))


def test_the_released_flow_grpo_divides_by_a_variance_without_the_step_size() -> None:
    """Its KL, over 2 g^2, is h times the true one; h = 0.2 here and g^2 = 0.49 * 0.8 / 0.2."""
    policy = flow_sde(scalar_case(), sigma_first=FIRST, noise_level=0.7)
    reference = flow_sde(scalar_case(velocity=-0.1), sigma_first=FIRST, noise_level=0.7)
    distance = (policy.mean - reference.mean).square().item()
    assert policy.kl(reference).item() * 0.2 == pytest.approx(distance / (2 * 0.49 * 0.8 / 0.2), rel=1e-5)


def test_the_gradient_of_the_kl_is_the_distance_over_the_variance() -> None:
    mean, reference = torch.tensor([[0.4]], requires_grad=True), torch.tensor([[0.1]])
    std = torch.tensor([0.5])
    Transition(mean=mean, std=std).kl(Transition(mean=reference, std=std)).sum().backward()
    assert mean.grad is not None
    assert mean.grad.item() == pytest.approx(0.3 / 0.25)


def test_the_largest_noise_that_keeps_the_root_real() -> None:
    """CPS with a = 1 replaces all noise: std = sigma', mean = (1 - sigma') x0."""
    transition = cps(scalar_case(), noise_level=1.0)
    assert transition.std.item() == pytest.approx(0.6)
    assert transition.mean.item() == pytest.approx(0.4 * 0.74, abs=1e-4)
    assert math.isfinite(ddim_sde(scalar_case(), sigma_first=FIRST, noise_level=1.0).mean.item())
