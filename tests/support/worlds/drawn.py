"""Latents that our sampler draws, to be compared with those of a pipeline."""

from collections.abc import Sequence

import torch

from flow.models.contract import Backbone, stack
from flow.policy import FlowPolicy
from flow.rollout import trajectory
from protocol.config.sampling import SamplingConfig
from protocol.messages import ConditionImage


def ode_latents(
    backbone: Backbone,
    initial: torch.Tensor,
    *,
    steps: int,
    guidance: float,
    text: str | Sequence[str],
    negative: str,
    conditions: tuple[ConditionImage, ...] = (),
) -> list[torch.Tensor]:
    """Sample without noise.

    Args:
        backbone: the model.
        initial: latents [B, C, h, w] to start from.
        steps: number of steps.
        guidance: weight of guidance; 1 for none.
        text: the prompt, or one for each row.
        negative: the negative prompt.
        conditions: condition images of each prompt.

    Returns:
        The latents after each step.
    """
    policy = FlowPolicy(backbone, SamplingConfig(steps=steps), guidance=guidance)
    texts = [text] if isinstance(text, str) else text
    pairs = [policy.conditioning(each, negative, conditions) for each in texts]
    drawn = trajectory(
        policy,
        initial=initial,
        conditioning=tuple(stack(rows) for rows in zip(*pairs, strict=True)),
        noise=lambda k: torch.zeros_like(initial),
        stochastic=(),
    )
    with torch.no_grad():
        return [step.next_latents for step in drawn]
