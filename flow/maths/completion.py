"""Clean-image estimates at a point of a trajectory: what the image would be if exploration ended here.

Every estimate follows the probability-flow ODE from the point's sigma down to 0 along its own grid of sigmas; Tweedie's
x - sigma v is the grid of one step. `substep_grid` makes a point's grid, `complete` walks all points of a shard, each
along its own, in one batch.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from flow.maths.interpolant import per_sample
from protocol.config.sampling import CompletionConfig

Velocity = Callable[[Float[Tensor, "B ..."], Float[Tensor, " B"]], Float[Tensor, "B ..."]]
"""velocity(latents, sigma): the policy's velocity at these states."""


def substep_grid(config: CompletionConfig, *, sigmas: Float[Tensor, " points"], k: int) -> Float[Tensor, " substeps"]:
    """Sigmas from point k's down to 0.

    `tweedie`: one step. `ode` (Stepwise-Flow-GRPO, arXiv 2603.28718): T' substeps, even in sigma, or even in steps of
    the schedule, between whose sigmas it interpolates linearly. `schedule` (TP-GRPO, arXiv 2602.06422; DenseGRPO, arXiv
    2601.20218): the steps that remain.

    Args:
        sigmas: the trajectory's schedule [T+1].
    """
    if config.rule == "schedule":
        return sigmas[k:]
    count = config.substeps if config.rule == "ode" else 1
    if config.spacing == "even":
        return sigmas[k] * (torch.arange(count, -1, -1) / count)
    last = len(sigmas) - 1
    place = torch.linspace(k, last, count + 1)
    below = place.floor().long().clamp(max=last - 1)
    return torch.lerp(sigmas[below], sigmas[below + 1], place - below)


def stack_grids(grids: list[Float[Tensor, " substeps"]], rows: list[int]) -> Float[Tensor, "B longest"]:
    """Each grid for as many rows as its point has, shorter ones filled up with 0."""
    longest = max(len(grid) for grid, count in zip(grids, rows, strict=True) if count)
    grids = [grid[:longest] for grid in grids]
    filled = [torch.cat([grid, grid.new_zeros(longest - len(grid))]) for grid in grids]
    return torch.cat([grid.expand(count, -1) for grid, count in zip(filled, rows, strict=True)])


def complete(
    *,
    latents: Float[Tensor, "B ..."],
    first_velocity: Float[Tensor, "B ..."],
    grid: Float[Tensor, "B substeps"],
    velocity: Velocity,
    solver: str = "euler",
) -> Float[Tensor, "B ..."]:
    """Clean latents of all points.

        euler   x' = x - h v
        heun    x' = x - h (v + v(x - h v)) / 2, Euler in the last substep
        adams   x' = x - h ((1 + r/2) v - r/2 v_before), r = h / h_before; Euler in the first substep

    The first substep uses the velocity that the main pass computed at exactly this state. A point of J substeps costs
    J - 1 forwards with `euler` and `adams`, 2 (J - 1) with `heun`; rows that have arrived are not computed any more.

    Args:
        first_velocity: the policy's velocity at (latents, grid[:, 0]), same guidance.
        grid: each row's sigmas, falling to 0 and filled up with 0.
        velocity: asked with all rows that are still under way; `FlowPolicy` cuts them to `model.forward_batch`.
    """
    current, before, step_before = latents, first_velocity, torch.zeros_like(grid[:, 0])
    for place in range(grid.shape[1] - 1):
        sigma, sigma_next = grid[:, place], grid[:, place + 1]
        step = sigma - sigma_next
        here = _ask(velocity, current, sigma) if place else first_velocity
        slope = here
        if solver == "adams" and place:
            ratio = torch.where(step_before > 0, step / step_before, 0.0) / 2
            slope = per_sample(1 + ratio, here) * here - per_sample(ratio, here) * before
        following = current - per_sample(step, current) * slope
        if solver == "heun" and (sigma_next > 0).any():
            there = _ask(velocity, following, sigma_next)
            is_inner = per_sample(sigma_next > 0, current)
            corrected = current - per_sample(step, current) * (here + there) / 2
            following = torch.where(is_inner, corrected, following)
        current, before, step_before = following, here, step
    return current


def _ask(velocity: Velocity, latents: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]) -> Float[Tensor, "B ..."]:
    """The velocity of the rows with sigma above 0; 0 elsewhere."""
    is_under_way = sigma > 0
    if is_under_way.all():
        return velocity(latents, sigma)
    answer = torch.zeros_like(latents)
    answer[is_under_way] = velocity(latents[is_under_way], sigma[is_under_way])
    return answer
