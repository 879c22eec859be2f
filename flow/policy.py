"""FlowPolicy: the one answer to "what is the velocity, mean, std and log-prob of this step?".

Rollout actors sample from it and the learner differentiates through it; neither computes any of these itself. With
equal weights and equal batch shapes a replay therefore gives the same log-prob bit for bit (ratio exactly 1).
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from flow.backbone import Backbone, Conditioning, repeat
from flow.schedule import linear_sigmas
from flow.transition import Transition, ddim_sde, flow_sde, ode
from protocol.config_policy import SamplingConfig
from protocol.errors import ConfigError


class FlowPolicy:
    """A backbone with a schedule, a kernel and a guidance weight.

    `steps` are the stochastic steps: std at least `std_min` and not the last one; every other step runs as ODE
    and is never trained.

        policy = FlowPolicy(backbone, config.sampling, guidance=1.0)
        transition, velocity = policy.transition(latents, k, conditioning=policy.conditioning("a red circle", ""))
    """

    def __init__(
        self, backbone: Backbone, config: SamplingConfig, *, guidance: float, forward_batch: int | None = None
    ) -> None:
        self.backbone = backbone
        self.guidance = guidance
        self.forward_batch = forward_batch
        self.sigmas: Float[Tensor, " points"] = (
            backbone.sigmas(config.steps) if config.schedule == "model" else linear_sigmas(steps=config.steps)
        )
        sigma_first = self.sigmas[1].item()
        if config.kernel == "flow_sde":
            self._kernel = partial(flow_sde, sigma_first=sigma_first, noise_level=config.noise_level)
        else:
            start = sigma_first if config.first_step == "clamp" else 1.0
            self._kernel = partial(ddim_sde, sigma_first=start, noise_level=config.noise_level)
        self.steps = tuple(k for k in range(config.steps - 1) if self._std(k) >= max(config.std_min, math.ulp(0.0)))
        if not self.steps:
            raise ConfigError(
                f"sampling must leave a step with std of at least std_min {config.std_min}, got none:"
                " raise noise_level or steps, or lower std_min"
            )

    @property
    def total_steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    def conditioning(self, text: str, negative: str) -> tuple[Conditioning, ...]:
        """What `velocity` wants for one prompt: its embeddings, before them the negative's when guidance is above 1."""
        positive = self.backbone.encode(text)
        return (self.backbone.encode(negative), positive) if self.guidance > 1 else (positive,)

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: tuple[Conditioning, ...]
    ) -> Float[Tensor, "B C H W"]:
        """The guided velocity: v_u + w (v_c - v_u), one forward of 2B; for w = 1 the plain one, one forward of B.

        More than `forward_batch` samples go in several forwards of at most that many.

        Args:
            conditioning: from `conditioning`; rows for each sample, or one row for all.
        """
        count = len(latents)
        rows = [each if len(next(iter(each.values()))) == count else repeat(each, count) for each in conditioning]
        most = self.forward_batch or count
        if count <= most:
            return self._guided(latents, sigma, rows)
        parts = [
            self._guided(
                latents[start : start + most],
                sigma[start : start + most],
                [{name: tensor[start : start + most] for name, tensor in each.items()} for each in rows],
            )
            for start in range(0, count, most)
        ]
        return torch.cat(parts)

    def _guided(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], rows: Sequence[Conditioning]
    ) -> Float[Tensor, "B C H W"]:
        if len(rows) == 1:
            return self.backbone.velocity(latents, sigma, rows[0])
        both = {name: torch.cat([each[name] for each in rows]) for name in rows[0]}
        without, toward = self.backbone.velocity(latents.repeat(2, 1, 1, 1), sigma.repeat(2), both).chunk(2)
        return without + self.guidance * (toward - without)

    def transition(
        self, latents: Float[Tensor, "B C H W"], k: int, *, conditioning: tuple[Conditioning, ...]
    ) -> tuple[Transition, Float[Tensor, "B C H W"]]:
        """Step k from these states, and the velocity it is made of."""
        sigma, sigma_next = (self.sigmas[i].expand(len(latents)).to(latents.device) for i in (k, k + 1))
        velocity = self.velocity(latents, sigma, conditioning)
        kernel = self._kernel if k in self.steps else ode
        return kernel(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next), velocity

    def _std(self, k: int) -> float:
        nothing = torch.zeros(1, 1)
        sigma, sigma_next = self.sigmas[k : k + 1], self.sigmas[k + 1 : k + 2]
        return self._kernel(latents=nothing, velocity=nothing, sigma=sigma, sigma_next=sigma_next).std.item()
