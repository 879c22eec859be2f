"""Latents that our sampler draws, to be compared with those of a pipeline."""

import torch

from flow.models.contract import Backbone
from flow.policy import FlowPolicy
from flow.rollout import trajectory
from protocol.config.sampling import SamplingConfig


def ode_latents(
    backbone: Backbone, initial: torch.Tensor, *, steps: int, guidance: float, text: str, negative: str
) -> list[torch.Tensor]:
    """Sample without noise.

    Args:
        backbone: the model.
        initial: latents [B, C, h, w] to start from.
        steps: number of steps.
        guidance: weight of guidance; 1 for none.
        text: the prompt.
        negative: the negative prompt.

    Returns:
        The latents after each step.
    """
    policy = FlowPolicy(backbone, SamplingConfig(steps=steps), guidance=guidance)
    drawn = trajectory(
        policy,
        initial=initial,
        conditioning=policy.conditioning(text, negative),
        noise=lambda k: torch.zeros_like(initial),
        stochastic=(),
    )
    with torch.no_grad():
        return [step.next_latents for step in drawn]
