"""Drawing: one SDE trajectory as a generator, a whole shard with its completed points, and plain ODE pictures.

request -> initial noise -> T transitions, velocities kept -> completions of the points in one batch -> pictures
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from flow.backbone import Conditioning, stack
from flow.completion import complete_by_ode
from flow.noise import INITIAL, SHARED, normal, trajectory_noise
from flow.policy import FlowPolicy
from flow.transition import Transition, ode
from protocol.config import RunConfig
from protocol.errors import NonFiniteError
from protocol.messages import DrawRequest, Rollout, ShardRequest


@dataclass(frozen=True)
class Step:
    """One step of a trajectory as it was drawn."""

    k: int
    latents: Float[Tensor, "N C H W"]
    velocity: Float[Tensor, "N C H W"]
    transition: Transition
    next_latents: Float[Tensor, "N C H W"]


def trajectory(
    policy: FlowPolicy,
    *,
    initial: Float[Tensor, "N C H W"],
    conditioning: tuple[Conditioning, ...],
    noise: Callable[[int], Float[Tensor, "N C H W"]],
) -> Iterator[Step]:
    """The T steps from `initial`; `noise(k)` is asked for stochastic steps only."""
    latents = initial
    for k in range(policy.total_steps):
        transition, velocity = policy.transition(latents, k, conditioning=conditioning)
        following = transition.sample(noise(k)) if k in policy.steps else transition.mean
        yield Step(k=k, latents=latents, velocity=velocity, transition=transition, next_latents=following)
        latents = following


@torch.no_grad()
def sample_shard(
    policy: FlowPolicy, request: ShardRequest, config: RunConfig
) -> tuple[Rollout, UInt8[np.ndarray, "I H W 3"]]:
    """Draw a shard's trajectories and the pictures to be scored.

    Pictures are the completed points of the stochastic steps (when the credit rule compares them), then the
    finished pictures: after the last stochastic step the finished picture itself stands for the point, not an
    estimate. With shared initial noise the first point is the same for all members and is completed once.

    Raises:
        NonFiniteError: the model produced NaN or infinity.
    """
    members = range(request.first_member, request.first_member + request.members)
    device = next(policy.backbone.transformer.parameters()).device
    shape = policy.backbone.latent_shape

    def noise(step: int, who: range | list[int] = members) -> Float[Tensor, "N C H W"]:
        return trajectory_noise(
            seed=config.seed,
            iteration=request.iteration,
            group=request.group,
            members=who,
            step=step,
            shape=shape,
        ).to(device)

    shared = config.sampling.shared_noise
    initial = noise(INITIAL, [SHARED]).repeat(len(members), 1, 1, 1) if shared else noise(INITIAL)
    conditioning = policy.conditioning(request.prompt.text, request.prompt.negative)
    steps = list(trajectory(policy, initial=initial, conditioning=conditioning, noise=noise))
    final = steps[-1].next_latents
    _require_finite(final, f"latents of group {request.group} in iteration {request.iteration}")

    stochastic = [step for step in steps if step.k in policy.steps]
    clean, index = final, torch.arange(len(members)).unsqueeze(1)
    if config.scores_points:
        points, index = _complete(policy, stochastic, conditioning, config, shared=shared)
        clean = torch.cat([points, final])
    rollout = Rollout(
        request=request,
        steps=policy.steps,
        latents=torch.stack([steps[0].latents, *(step.next_latents for step in steps)], dim=1).cpu().numpy(),
        log_probs=torch.stack([s.transition.log_prob(s.next_latents) for s in stochastic], dim=1).cpu().numpy(),
        image_index=index.numpy(),
    )
    return rollout, policy.backbone.decode(clean)


@torch.no_grad()
def draw(policy: FlowPolicy, request: DrawRequest) -> UInt8[np.ndarray, "B H W 3"]:
    """Pictures by the probability-flow ODE, one for each (prompt, number) of the request."""
    device = next(policy.backbone.transformer.parameters()).device
    pairs = [policy.conditioning(prompt.text, prompt.negative) for prompt in request.prompts]
    conditioning = tuple(stack(rows) for rows in zip(*pairs, strict=True))
    shape = policy.backbone.latent_shape
    keys = zip(request.prompts, request.numbers, strict=True)
    latents = torch.stack([normal("draw", request.seed, p.index, number, shape=shape) for p, number in keys]).to(device)
    sigmas = policy.backbone.sigmas(request.steps).to(device)
    for k in range(request.steps):
        sigma, sigma_next = sigmas[k].expand(len(latents)), sigmas[k + 1].expand(len(latents))
        velocity = policy.velocity(latents, sigma, conditioning)
        latents = ode(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next).mean
    _require_finite(latents, f"latents of a drawing with policy version {request.version}")
    return policy.backbone.decode(latents)


def _complete(
    policy: FlowPolicy,
    stochastic: list[Step],
    conditioning: tuple[Conditioning, ...],
    config: RunConfig,
    *,
    shared: bool,
) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, "N P"]]:
    """Clean latents of all points before a stochastic step, in one batch, and the picture number of every point."""
    members = len(stochastic[0].latents)
    first_rows = 1 if shared else members
    rows = [first_rows] + [members] * (len(stochastic) - 1)
    clean = complete_by_ode(
        latents=torch.cat([step.latents[:count] for step, count in zip(stochastic, rows, strict=True)]),
        first_velocity=torch.cat([step.velocity[:count] for step, count in zip(stochastic, rows, strict=True)]),
        sigma=torch.cat([policy.sigmas[s.k].repeat(n) for s, n in zip(stochastic, rows, strict=True)]).to(
            stochastic[0].latents.device
        ),
        substeps=config.completion.substeps if config.completion.rule == "ode" else 1,
        velocity=lambda latents, sigma: policy.velocity(latents, sigma, conditioning),
    )
    own = torch.arange(members)
    columns = [torch.zeros_like(own) if shared else own]
    columns += [first_rows + members * place + own for place in range(len(stochastic))]
    return clean, torch.stack(columns, dim=1)


def _require_finite(latents: Tensor, what: str) -> None:
    if not torch.isfinite(latents).all():
        raise NonFiniteError(f"{what} must be finite, got NaN or infinity")
