"""One denoising step as a Gaussian: x' ~ N(mean, std^2 I). The only place where a step's mean, std and log-prob exist.

Every kernel is a function of the state, the velocity and two sigmas that returns a `Transition`; rollout and
learner call the same one through `FlowPolicy`. All arithmetic is float32. With t = sigma, t' = sigma_next,
h = t - t', x0 = x - t v and x1 = x + (1 - t) v:

    flow_sde   mean = x - h (v + g^2 / (2t) x1),  std = g sqrt(h),  g^2 = a^2 t / (1 - t~)
    dance_sde  the same with g = eta
    ddim_sde   mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1,  std = eta t' sqrt(1 - t~)
    cps        the same with std = t' sin(a pi / 2)
    ode        mean = x - h v,  std = 0

t~ is t, but sigma_1 where t is 1, so that the first step keeps a finite (flow_sde) or non-zero (ddim_sde) std.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flow.maths.interpolant import clean_estimate, noise_estimate, per_sample

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
LogProbForm = Literal["gaussian", "squared"]


@dataclass(frozen=True)
class Transition:
    """N(mean, std^2 I), float32; std is the std of the whole step, so nobody multiplies by sqrt(h) again."""

    mean: Float[Tensor, "B ..."]
    std: Float[Tensor, " B"]
    log_prob_form: LogProbForm = "gaussian"
    """What `log_prob` answers: the density's logarithm, or CPS's published form without 1 / (2 std^2) and constants."""

    def sample(self, noise: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        """mean + std * noise, for standard normal `noise`."""
        return self.mean + per_sample(self.std, self.mean) * noise

    def log_prob(self, value: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
        """Gaussian log-density, **mean** over latent elements (Flow-GRPO, arXiv 2505.05470):

            mean_d[ -(x' - mean)^2 / (2 std^2) ] - log std - log(2 pi) / 2

        Defined for std > 0 only; `value` is a sample and carries no gradient. In the form `squared` it is
        mean_d[ -(x' - mean)^2 ], as coefficients-preserving sampling was published: step k then weighs 2 std_k^2 times
        what it weighs in the Gaussian form.
        """
        squared = (value.detach() - self.mean).square().flatten(1).mean(1)
        if self.log_prob_form == "squared":
            return -squared
        return -squared / (2 * self.std.square()) - self.std.log() - HALF_LOG_TWO_PI

    def kl(self, reference: "Transition") -> Float[Tensor, " B"]:
        """KL(self || reference) of Gaussians with equal std, **mean** over latent elements:

            mean_d[ (mean - mean_ref)^2 / (2 std^2) ]

        The std of one kernel at one step does not depend on the weights, so policy and reference share it. Published
        code of Flow-GRPO divides by 2 g^2 instead (std without sqrt(h)); that is this number times h.
        """
        squared = (self.mean - reference.mean).square().flatten(1).mean(1)
        return squared / (2 * self.std.square())


def flow_sde(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """Flow-GRPO's SDE (arXiv 2505.05470): the marginals of the probability-flow ODE, with noise.

    mean = x - h [v + g^2 / (2t) x1],  std = g sqrt(h),  g^2 = a^2 t / (1 - t~)

    Args:
        sigma_first: sigma_1 of the schedule, stands for t in 1 - t where t is 1.
        noise_level: a.
    """
    variance = noise_level**2 * sigma / (1 - _away_from_one(sigma, sigma_first))
    return _score_sde(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next, diffusion=variance)


def dance_sde(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
    noise_level: float,
) -> Transition:
    """DanceGRPO's SDE (arXiv 2505.07818): Flow-SDE's form with the same diffusion at every sigma.

    mean = x - h [v + eta^2 / (2t) x1],  std = eta sqrt(h)

    Args:
        noise_level: eta. With a level of its own for every step it is the SDE of DenseGRPO (arXiv 2601.20218).
    """
    return _score_sde(
        latents=latents,
        velocity=velocity,
        sigma=sigma,
        sigma_next=sigma_next,
        diffusion=torch.full_like(sigma, noise_level).square(),
    )


def ddim_sde(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """The DDIM-inspired SDE of Stepwise-Flow-GRPO (arXiv 2603.28718): less noise early and late.

    mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1,  std = eta t' sqrt(1 - t~)

    Args:
        sigma_first: sigma_1 of the schedule; replaces t where t is 1. 1.0 gives the literal formula, std 0 there.
        noise_level: eta in (0, 1], so that std <= t'.
    """
    std = noise_level * sigma_next * (1 - _away_from_one(sigma, sigma_first)).sqrt()
    return _preserving(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next, std=std)


def cps(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
    noise_level: float,
) -> Transition:
    """Coefficients-preserving sampling (CPS, arXiv 2509.05952): the share of noise in x' is that of the schedule.

    mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1,  std = t' sin(a pi / 2)

    Args:
        noise_level: a in (0, 1]; 1 replaces the noise wholly.
    """
    std = math.sin(noise_level * math.pi / 2) * sigma_next
    return _preserving(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next, std=std)


def ode(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
) -> Transition:
    """Euler's step of the probability-flow ODE: mean = x - h v, std = 0."""
    return Transition(mean=latents - per_sample(sigma - sigma_next, latents) * velocity, std=torch.zeros_like(sigma))


def _away_from_one(sigma: Float[Tensor, " B"], sigma_first: float) -> Float[Tensor, " B"]:
    return torch.where(sigma == 1, torch.full_like(sigma, sigma_first), sigma)


def _score_sde(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
    diffusion: Float[Tensor, " B"],
) -> Transition:
    """mean = x - h [v + g^2 / (2t) x1], std = g sqrt(h), where `diffusion` is g^2."""
    step = sigma - sigma_next
    noise = noise_estimate(latents=latents, velocity=velocity, sigma=sigma)
    drift = velocity + per_sample(diffusion / (2 * sigma), velocity) * noise
    return Transition(mean=latents - per_sample(step, latents) * drift, std=(diffusion * step).sqrt())


def _preserving(
    *,
    latents: Float[Tensor, "B ..."],
    velocity: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    sigma_next: Float[Tensor, " B"],
    std: Float[Tensor, " B"],
) -> Transition:
    """mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1: old and new noise together are as much as the schedule wants."""
    clean = clean_estimate(latents=latents, velocity=velocity, sigma=sigma)
    noise = noise_estimate(latents=latents, velocity=velocity, sigma=sigma)
    kept = (sigma_next.square() - std.square()).sqrt()
    return Transition(mean=per_sample(1 - sigma_next, clean) * clean + per_sample(kept, noise) * noise, std=std)
