"""Clean-picture estimates against Tweedie's formula and the exact flow of the Gaussian world."""

import torch

from flow.completion import complete_by_ode
from flow.gaussian import gaussian_velocity
from flow.interpolant import clean_estimate, noise_estimate

MEAN, SPREAD = 0.7, 0.5


def field(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=SPREAD)


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, 3, generator=generator), torch.tensor([1.0, 1.0, 0.8, 0.5, 0.25, 0.1])


def test_both_ends_of_the_path_come_back_from_a_state_on_it() -> None:
    clean, noise, sigma = torch.tensor([[0.74]]), torch.tensor([[0.44]]), torch.tensor([0.8])
    latents, velocity = 0.2 * clean + 0.8 * noise, noise - clean
    torch.testing.assert_close(clean_estimate(latents=latents, velocity=velocity, sigma=sigma), clean)
    torch.testing.assert_close(noise_estimate(latents=latents, velocity=velocity, sigma=sigma), noise)


def test_one_substep_is_tweedie_s_estimate_and_asks_for_no_velocity() -> None:
    latents, sigma = points()
    velocity = field(latents, sigma)

    def never(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        raise AssertionError("one substep needs no further velocity")

    completed = complete_by_ode(latents=latents, first_velocity=velocity, sigma=sigma, substeps=1, velocity=never)
    assert torch.equal(completed, clean_estimate(latents=latents, velocity=velocity, sigma=sigma))


def test_substeps_run_evenly_to_zero_and_reuse_the_first_velocity_with_all_points_in_one_batch() -> None:
    latents, sigma = points()
    asked: list[torch.Tensor] = []

    def watched(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        asked.append(at)
        return field(states, at)

    completed = complete_by_ode(
        latents=latents, first_velocity=field(latents, sigma), sigma=sigma, substeps=5, velocity=watched
    )
    assert len(asked) == 4
    for place, at in enumerate(asked, start=1):
        torch.testing.assert_close(at, sigma * (1 - place / 5))
    by_hand = latents
    for place in range(5):
        at = sigma * (1 - place / 5)
        by_hand = by_hand - (sigma / 5).view(-1, 1, 1) * field(by_hand, at)
    torch.testing.assert_close(completed, by_hand)


def test_the_first_velocity_is_taken_as_given() -> None:
    latents, sigma = points()
    completed = complete_by_ode(
        latents=latents,
        first_velocity=torch.full_like(latents, 2.0),
        sigma=sigma,
        substeps=2,
        velocity=lambda states, at: torch.zeros_like(states),
    )
    assert torch.equal(completed, latents - sigma.view(-1, 1, 1))


def test_more_substeps_approach_the_exact_flow_s_endpoint() -> None:
    """From x at t the exact flow ends at mean + spread / s(t) (x - (1 - t) mean), s(t)^2 = (1-t)^2 spread^2 + t^2."""
    latents, sigma = points()
    t = sigma.view(-1, 1, 1)
    exact = MEAN + SPREAD / ((1 - t) ** 2 * SPREAD**2 + t**2).sqrt() * (latents - (1 - t) * MEAN)

    def error(substeps: int) -> float:
        completed = complete_by_ode(
            latents=latents, first_velocity=field(latents, sigma), sigma=sigma, substeps=substeps, velocity=field
        )
        return (completed - exact).abs().max().item()

    errors = [error(substeps) for substeps in (1, 2, 5, 20, 100)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


def test_in_a_world_of_one_picture_every_estimate_is_that_picture() -> None:
    latents, sigma = points()

    def certain(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return gaussian_velocity(latents=states, sigma=at, mean=MEAN, spread=0.0)

    completed = complete_by_ode(
        latents=latents, first_velocity=certain(latents, sigma), sigma=sigma, substeps=3, velocity=certain
    )
    torch.testing.assert_close(completed, torch.full_like(latents, MEAN), rtol=0, atol=1e-5)
