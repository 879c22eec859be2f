"""Completions: estimates of the clean image at a point of a trajectory, as if exploration ended there.

A completion integrates the probability-flow ODE from the point's sigma down to 0 on a grid of sigmas. Tweedie's
estimate x - sigma v is the grid of one step. `substep_grid` makes the grid of one point. `complete` integrates all
points of a shard in one batch, each on its own grid.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flow.maths.transition import per_sample
from protocol.config.sampling import IntegrationConfig

Velocity = Callable[[Float[Tensor, "B ..."], Float[Tensor, " B"]], Float[Tensor, "B ..."]]
"""A function velocity(latents, sigma) that returns the policy's velocity at these states."""


def substep_grid(config: IntegrationConfig, *, sigmas: Float[Tensor, " points"], k: int) -> Float[Tensor, " substeps"]:
    """Return the sigmas of one point's completion, from the point's own sigma down to 0.

    - `tweedie`: one step.
    - `ode` (Stepwise-Flow-GRPO, arXiv 2603.28718): T' substeps, or fewer of them for a later point (`tapers`). They are
      even in sigma, or even in steps of the schedule with linear interpolation between its sigmas.
    - `schedule` (TP-GRPO, arXiv 2602.06422; DenseGRPO, arXiv 2601.20218): the remaining steps of the schedule.

    Args:
        config: rule, number of substeps and spacing.
        sigmas: the trajectory's schedule [T+1].
        k: the point, 0 <= k < T.

    Returns:
        Sigmas [substeps + 1], falling from `sigmas[k]` to 0.
    """
    if config.rule == "schedule":
        return sigmas[k:]
    last = len(sigmas) - 1
    share = sigmas[k].item() if config.spacing == "even" else (last - k) / last
    count = config.substeps_from(share) if config.rule == "ode" else 1
    if config.spacing == "even":
        return sigmas[k] * (torch.arange(count, -1, -1) / count)
    position = torch.linspace(k, last, count + 1)
    below = position.floor().long().clamp(max=last - 1)
    return torch.lerp(sigmas[below], sigmas[below + 1], position - below)


def granular_grid(sigmas: Float[Tensor, " points"], *, k: int, granularity: int) -> Float[Tensor, " substeps"]:
    """Return the sigmas of the ODE after a stochastic step that led to point k (G2RPO, arXiv 2510.01982).

    Its first step is the schedule's own, each further one spans `granularity` of them; the last ends at 0.

    Args:
        sigmas: the trajectory's schedule [T+1].
        k: the point, 0 < k < T.

    Returns:
        Sigmas [substeps + 1], falling from `sigmas[k]` to 0.
    """
    return torch.cat([sigmas[k : k + 1], sigmas[k + 1 :: granularity][:-1], sigmas[-1:]])


def stack_grids(grids: list[Float[Tensor, " substeps"]], rows: list[int]) -> Float[Tensor, "B longest"]:
    """Repeat each grid for the rows of its point; pad shorter grids with 0."""
    return pad_sequence(grids, batch_first=True).repeat_interleave(torch.tensor(rows), dim=0)


def complete(
    *,
    latents: Float[Tensor, "B ..."],
    first_velocity: Float[Tensor, "B ..."],
    grid: Float[Tensor, "B substeps"],
    velocity: Velocity,
    solver: str = "euler",
) -> Float[Tensor, "B ..."]:
    """Complete all points of a batch.

        euler   x' = x - h v
        heun    x' = x - h (v + v(x - h v)) / 2, Euler in the last substep
        adams   x' = x - h ((1 + r/2) v - r/2 v_before), r = h / h_before; Euler in the first substep
        dpm     x' = x - h v + (1 - sigma'/sigma) q/2 (x0 - x0_before), q = g / g_before, x0 = x - sigma v;
                Euler in the first substep and in the last

    `dpm` is DPM-Solver++ 2M (arXiv 2211.01095): g is the growth of log((1 - sigma) / sigma) in a step. Behind sigma 1,
    where g_before is infinite, it is Euler. h is the step size, the difference of two neighbouring sigmas of the grid.
    The first substep reuses the velocity that the main pass computed at exactly this state. A point of J substeps costs
    J - 1 forwards, and 2 (J - 1) with `heun`. Rows that have reached sigma 0 cost no further forward.

    Args:
        first_velocity: the policy's velocity at (latents, grid[:, 0]) with the same guidance [B, ...].
        grid: sigmas of each row, falling to 0 and padded with 0 [B, substeps + 1].
        velocity: evaluated on all rows whose sigma is above 0; `FlowPolicy` splits them by `model.forward_batch`.
        solver: `euler`, `heun`, `adams` or `dpm`.

    Returns:
        Clean latents [B, ...].
    """
    current, before, h_before = latents, first_velocity, torch.zeros_like(grid[:, 0])
    growths = torch.logit(1 - grid.double()).diff(dim=1)
    clean_before = latents
    for index in range(grid.shape[1] - 1):
        sigma, sigma_next = grid[:, index], grid[:, index + 1]
        h = sigma - sigma_next
        here = _velocity_where_noisy(velocity, current, sigma) if index else first_velocity
        slope = here
        if solver == "adams" and index:
            ratio = torch.where(h_before > 0, h / h_before, 0.0) / 2
            slope = per_sample(1 + ratio, here) * here - per_sample(ratio, here) * before
        following = current - per_sample(h, current) * slope
        if solver == "dpm":
            clean = current - per_sample(sigma, current) * here
            if index:
                is_inner = (sigma_next > 0) & growths[:, index - 1].isfinite()
                share = (1 - sigma_next / sigma) * (growths[:, index] / growths[:, index - 1]).float() / 2
                following = following + per_sample(torch.where(is_inner, share, 0.0), current) * (clean - clean_before)
            clean_before = clean
        if solver == "heun" and (sigma_next > 0).any():
            there = _velocity_where_noisy(velocity, following, sigma_next)
            is_inner = per_sample(sigma_next > 0, current)
            corrected = current - per_sample(h, current) * (here + there) / 2
            following = torch.where(is_inner, corrected, following)
        current, before, h_before = following, here, h
    return current


def _velocity_where_noisy(
    velocity: Velocity, latents: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """Return the velocity of the rows with sigma above 0, and 0 for the others."""
    is_noisy = sigma > 0
    if is_noisy.all():
        return velocity(latents, sigma)
    answer = torch.zeros_like(latents)
    answer[is_noisy] = velocity(latents[is_noisy], sigma[is_noisy])
    return answer
