"""Clean-picture estimates at a point of a trajectory: what the picture would be if exploration ended here.

`flow.interpolant.clean_estimate` is Tweedie's; `complete_by_ode` follows the probability-flow ODE in a few substeps.
Points of all steps and members stand in one batch, each with its own sigma.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from flow.interpolant import per_sample

Velocity = Callable[[Float[Tensor, "B ..."], Float[Tensor, " B"]], Float[Tensor, "B ..."]]
"""velocity(latents, sigma): the policy's velocity at these states."""


def complete_by_ode(
    *,
    latents: Float[Tensor, "B ..."],
    first_velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    substeps: int,
    velocity: Velocity,
) -> Float[Tensor, "B ..."]:
    """Euler from each point's sigma to 0 over linspace(sigma, 0, T' + 1) (Stepwise-Flow-GRPO, arXiv 2603.28718).

    The first substep uses the velocity that the main pass computed at exactly this state, so the cost is T' - 1
    forwards; T' = 1 is Tweedie's estimate.

    Args:
        first_velocity: the policy's velocity at (latents, sigma), same guidance.
        substeps: T', at least 1.
        velocity: asked T' - 1 times, with all points in one batch.
    """
    step = per_sample(sigma / substeps, latents)
    current = latents - step * first_velocity
    for substep in range(1, substeps):
        remaining = sigma * ((substeps - substep) / substeps)
        current = current - step * velocity(current, remaining)
    return current
