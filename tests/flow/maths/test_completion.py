"""Clean-image estimates against Tweedie's formula and the exact flow of the Gaussian world."""

from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from flow.maths.completion import complete, stack_grids, substep_grid
from flow.maths.schedule import linear_sigmas, sd3_sigmas
from flow.maths.transition import Start, clean_estimate
from protocol.config.sampling import CompletionConfig, IntegrationConfig
from tests.support.worlds.gaussian import gaussian_velocity

MEAN, SPREAD = 0.7, 0.5
SIGMAS = sd3_sigmas(steps=10)


def field(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=SPREAD)


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, 3, generator=generator), torch.tensor([1.0, 1.0, 0.8, 0.5, 0.25, 0.1])


def even(sigma: torch.Tensor, substeps: int) -> torch.Tensor:
    return torch.stack([sigma * (1 - index / substeps) for index in range(substeps + 1)], dim=1)


def completed(substeps: int, **how: Any) -> torch.Tensor:
    latents, sigma = points()
    settings = {"first_velocity": field(latents, sigma), "grid": even(sigma, substeps), "velocity": field} | how
    return complete(latents=latents, **settings)


def exact() -> torch.Tensor:
    """From x at t the exact flow ends at mean + spread / s(t) (x - (1 - t) mean), s(t)^2 = (1-t)^2 spread^2 + t^2."""
    latents, sigma = points()
    t = sigma.view(-1, 1, 1)
    return MEAN + SPREAD / ((1 - t) ** 2 * SPREAD**2 + t**2).sqrt() * (latents - (1 - t) * MEAN)


def test_both_ends_of_the_path_come_back_from_a_state_on_it() -> None:
    clean, noise, sigma = torch.tensor([[0.74]]), torch.tensor([[0.44]]), torch.tensor([0.8])
    latents, velocity = 0.2 * clean + 0.8 * noise, noise - clean
    start = Start(latents, velocity, sigma, torch.tensor([0.6]))
    torch.testing.assert_close(start.clean, clean)
    torch.testing.assert_close(start.noise, noise)


@pytest.mark.parametrize("solver", ["euler", "heun", "adams", "dpm"])
def test_one_substep_is_tweedie_s_estimate_and_asks_for_no_velocity(solver: str) -> None:
    latents, sigma = points()

    def never(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        raise AssertionError("one substep needs no further velocity")

    estimate = clean_estimate(latents=latents, velocity=field(latents, sigma), sigma=sigma)
    assert torch.equal(completed(1, velocity=never, solver=solver), estimate)


def test_substeps_run_evenly_to_zero_and_reuse_the_first_velocity_with_all_points_in_one_batch() -> None:
    latents, sigma = points()
    asked: list[torch.Tensor] = []

    def watched(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        asked.append(at)
        return field(states, at)

    result = completed(5, velocity=watched)
    assert len(asked) == 4
    for index, at in enumerate(asked, start=1):
        torch.testing.assert_close(at, sigma * (1 - index / 5))
    by_hand = latents
    for index in range(5):
        at = sigma * (1 - index / 5)
        by_hand = by_hand - (sigma / 5).view(-1, 1, 1) * field(by_hand, at)
    torch.testing.assert_close(result, by_hand)


def test_the_first_velocity_is_taken_as_given() -> None:
    latents, sigma = points()
    result = completed(
        2, first_velocity=torch.full_like(latents, 2.0), velocity=lambda states, at: torch.zeros_like(states)
    )
    assert torch.equal(result, latents - sigma.view(-1, 1, 1))


def test_more_substeps_approach_the_exact_flow_s_endpoint() -> None:
    def error(substeps: int) -> float:
        return (completed(substeps) - exact()).abs().max().item()

    assert error(400) < 0.004
    assert error(50) / error(400) == pytest.approx(8, rel=0.1), "Euler's error falls with the substep"


@pytest.mark.parametrize("solver", ["heun", "adams"])
def test_the_second_order_solvers_errors_fall_with_the_square_of_the_substep(solver: str) -> None:
    def error(substeps: int) -> float:
        return (completed(substeps, solver=solver) - exact()).abs().max().item()

    assert error(20) < (completed(20) - exact()).abs().max().item() / 4
    assert 2.8 < error(20) / error(40) < 4.6


@pytest.mark.parametrize("steps", [2, 10])
def test_dpm_is_diffusers_second_order_solver(steps: int) -> None:
    """On its own flow sigmas, and on those of SD3, which begin at 1."""
    for sigmas in (None, FlowMatchEulerDiscreteScheduler(shift=3.0)):
        solver = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
        solver.set_timesteps(steps)
        if sigmas:
            sigmas.set_timesteps(steps)
            solver.sigmas = sigmas.sigmas.clone()
            solver.sigmas[0] -= 1e-7  # diffusers takes its logarithm
        latents, _ = points()
        grid = solver.sigmas.expand(len(latents), -1)
        whole = complete(
            latents=latents, first_velocity=field(latents, grid[:, 0]), grid=grid, velocity=field, solver="dpm"
        )
        solver.set_begin_index(0)
        for index, time in enumerate(solver.timesteps):
            latents = solver.step(field(latents, grid[:, index]), time, latents).prev_sample
        torch.testing.assert_close(whole, latents, rtol=0, atol=2e-6)


def test_two_adams_substeps_are_the_worked_ones() -> None:
    """v = 1 then 3 with h = 0.5: x - 0.5 * 1, then - 0.5 * (1.5 * 3 - 0.5 * 1)."""
    result = complete(
        latents=torch.tensor([[4.0]]),
        first_velocity=torch.tensor([[1.0]]),
        grid=torch.tensor([[1.0, 0.5, 0.0]]),
        velocity=lambda states, at: torch.full_like(states, 3.0),
        solver="adams",
    )
    assert result.item() == pytest.approx(4.0 - 0.5 - 0.5 * 4.0)


@pytest.mark.parametrize(
    ("tail", "clean"),
    [
        (IntegrationConfig(rule="schedule", solver="euler"), 0.875**4),
        (IntegrationConfig(rule="ode", substeps=2, spacing="schedule", solver="adams"), 0.59375),
    ],
)
def test_the_tails_of_the_docs_are_the_worked_ones(tail: IntegrationConfig, clean: float) -> None:
    """Points 4 to 8 of an even schedule, x = 1, v = x."""
    result = complete(
        latents=torch.tensor([[1.0]]),
        first_velocity=torch.tensor([[1.0]]),
        grid=substep_grid(tail, sigmas=linear_sigmas(steps=8), k=4).unsqueeze(0),
        velocity=lambda states, at: states,
        solver=tail.solver,
    )
    assert result.item() == pytest.approx(clean)


@pytest.mark.parametrize(("solver", "forwards"), [("euler", 4), ("adams", 4), ("dpm", 4), ("heun", 8)])
def test_each_solver_costs_the_forwards_that_it_says(solver: str, forwards: int) -> None:
    asked = []

    def watched(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        asked.append(len(states))
        return field(states, at)

    completed(5, velocity=watched, solver=solver)
    assert asked == [6] * forwards


@pytest.mark.parametrize("solver", ["euler", "adams"])
@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        ({"rule": "tweedie"}, 0),
        ({"rule": "ode", "substeps": 2}, 8 + 1 / 24),
        ({"rule": "ode", "substeps": 5}, 32 + 4 / 24),
        ({"rule": "ode", "substeps": 8}, 56 + 7 / 24),
        ({"rule": "schedule"}, 36 + 9 / 24),
        ({"rule": "ode", "substeps": 2, "spacing": "even", "tapers": True}, 6 + 1 / 24),
        ({"rule": "ode", "substeps": 5, "spacing": "schedule", "tapers": True}, 16 + 4 / 24),
    ],
)
def test_a_trajectory_s_completions_cost_the_worked_forwards(
    settings: dict[str, Any], forwards: float, solver: str
) -> None:
    """Beyond the main pass of ten steps, nine of them stochastic; with shared noise the first point is the group's."""
    members, asked = 24, [0]

    def watched(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        asked.append(len(states))
        return field(states, at)

    grids = [substep_grid(CompletionConfig(**({"tapers": False} | settings)), sigmas=SIGMAS, k=k) for k in range(9)]
    grid = stack_grids(grids, [1] + [members] * 8)
    latents = torch.zeros(len(grid), 1)
    complete(latents=latents, first_velocity=field(latents, grid[:, 0]), grid=grid, velocity=watched, solver=solver)
    assert sum(asked) / members == pytest.approx(forwards)


def test_a_data_point_without_spread_is_found_in_one_substep_from_anywhere() -> None:
    latents, sigma = points()

    def certain(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return gaussian_velocity(latents=states, sigma=at, mean=MEAN, spread=0.0)

    result = complete(latents=latents, first_velocity=certain(latents, sigma), grid=even(sigma, 3), velocity=certain)
    torch.testing.assert_close(result, torch.full_like(latents, MEAN), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "k", "expected"),
    [
        ({"rule": "tweedie"}, 3, [0.857692, 0.0]),
        ({"rule": "ode", "substeps": 2, "spacing": "even"}, 3, [0.857692, 0.428846, 0.0]),
        ({"rule": "schedule"}, 6, [0.602151, 0.464876, 0.278049, 0.008929, 0.0]),
        ({"rule": "ode", "substeps": 4, "spacing": "schedule"}, 6, [0.602151, 0.464876, 0.278049, 0.008929, 0.0]),
        ({"rule": "ode", "substeps": 2, "spacing": "schedule"}, 6, [0.602151, 0.278049, 0.0]),
        (
            {"rule": "ode", "substeps": 3, "spacing": "schedule"},
            8,
            [0.278049, 0.278049 / 3 + 0.008929 * 2 / 3, None, 0],
        ),
        ({"rule": "ode", "substeps": 2, "spacing": "even", "tapers": True}, 6, [0.602151, 0.3010755, 0.0]),
        ({"rule": "ode", "substeps": 2, "spacing": "even", "tapers": True}, 7, [0.464876, 0.0]),
        ({"rule": "ode", "substeps": 5, "spacing": "schedule", "tapers": True}, 6, [0.602151, 0.278049, 0.0]),
        ({"rule": "ode", "substeps": 5, "spacing": "schedule", "tapers": True}, 8, [0.278049, 0.0]),
    ],
)
def test_grids_are_the_worked_ones(settings: dict[str, Any], k: int, expected: list[float | None]) -> None:
    grid = substep_grid(CompletionConfig(**({"tapers": False} | settings)), sigmas=SIGMAS, k=k)
    assert len(grid) == len(expected)
    for value, wanted in zip(grid.tolist(), expected, strict=True):
        assert wanted is None or value == pytest.approx(wanted, abs=1e-6)


def test_even_grids_of_a_linear_schedule_do_not_depend_on_the_spacing() -> None:
    for k in range(6):
        grids = [
            substep_grid(
                CompletionConfig(substeps=5, spacing=spacing, tapers=False), sigmas=linear_sigmas(steps=6), k=k
            )  # type: ignore[arg-type]
            for spacing in ("even", "schedule")
        ]
        torch.testing.assert_close(*grids)


def test_points_walk_their_own_grids_in_one_batch_and_rest_when_they_have_arrived() -> None:
    latents, _ = points()
    grids = [SIGMAS[k:] for k in (4, 8)]
    rows = stack_grids(grids, [4, 2])
    assert rows.shape == (6, 7)
    asked = []

    def watched(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        assert (at > 0).all()
        asked.append(len(states))
        return field(states, at)

    together = complete(latents=latents, first_velocity=field(latents, rows[:, 0]), grid=rows, velocity=watched)
    assert asked == [6, 4, 4, 4, 4]
    for part, grid in ((slice(0, 4), grids[0]), (slice(4, 6), grids[1])):
        own = grid.expand(len(latents[part]), -1)
        alone = complete(
            latents=latents[part], first_velocity=field(latents[part], own[:, 0]), grid=own, velocity=field
        )
        assert torch.equal(together[part], alone)
