"""One denoising step as a Gaussian x' ~ N(mean, std^2 I): the only definition of a step's mean, std and log-prob.

A kernel is a function of a step's `Start`; it returns a `Transition`. Rollout and learner call the same kernel through
`FlowPolicy`. All arithmetic is float32. With t = sigma, t' = sigma_next, step size h = t - t', x0 = x - t v and
x1 = x + (1 - t) v:

    flow_sde   mean = x - h (v + g^2 / (2t) x1),  std = g sqrt(h),  g^2 = a^2 t / (1 - t~)
    dance_sde  the same with g = eta
    ddim_sde   mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1,  std = eta t' sqrt(1 - t~)
    cps        the same with std = t' sin(a pi / 2)
    ode        mean = x - h v,  std = 0

The state and its velocity v = x1 - x0 give both ends of the path x = (1 - t) x0 + t x1: `Start.clean` (Tweedie's)
and `Start.noise`. t~ is t, except that sigma_1 replaces t = 1. So the std of the first step stays finite (flow_sde)
or above 0 (ddim_sde).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
LogProbForm = Literal["gaussian", "squared"]


@dataclass(frozen=True)
class Start:
    """Where one step starts: states, the velocities there, and the sigmas that it leads from and to."""

    latents: Float[Tensor, "B ..."]
    """x."""
    velocity: Float[Tensor, "B ..."]
    """v, the policy's velocity at these states."""
    sigma: Float[Tensor, " B"]
    """t of each row."""
    sigma_next: Float[Tensor, " B"]
    """t' of each row."""

    @property
    def step_size(self) -> Float[Tensor, " B"]:
        """h = t - t'."""
        return self.sigma - self.sigma_next

    @property
    def clean(self) -> Float[Tensor, "B ..."]:
        """Tweedie's estimate of the clean latents, x0 = x - t v."""
        return clean_estimate(latents=self.latents, velocity=self.velocity, sigma=self.sigma)

    @property
    def noise(self) -> Float[Tensor, "B ..."]:
        """The estimate of the noise, x1 = x + (1 - t) v."""
        return self.latents + per_sample(1 - self.sigma, self.latents) * self.velocity


@dataclass(frozen=True)
class Transition:
    """The Gaussian N(mean, std^2 I) of one step, float32.

    std is the std of the whole step: it contains the factor sqrt(h) already.
    """

    mean: Float[Tensor, "B ..."]
    std: Float[Tensor, " B"]
    log_prob_form: LogProbForm = "gaussian"
    """Form of `log_prob`: `gaussian`, the log-density, or `squared`, CPS's published form without 1 / (2 std^2) and
    constants."""

    def sample(self, noise: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        """Return mean + std * noise for standard normal `noise`."""
        return self.mean + per_sample(self.std, self.mean) * noise

    def log_prob(self, value: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
        """Return the Gaussian log-density, **mean** over latent elements (Flow-GRPO, arXiv 2505.05470):

            mean_d[ -(x' - mean)^2 / (2 std^2) ] - log std - log(2 pi) / 2

        It is defined for std > 0 only. `value` is a sample, so it carries no gradient. The form `squared` is
        mean_d[ -(x' - mean)^2 ], as coefficients-preserving sampling was published. Compared with the Gaussian form, it
        multiplies the gradient of step k by 2 std_k^2.
        """
        squared = (value.detach() - self.mean).square().flatten(1).mean(1)
        if self.log_prob_form == "squared":
            return -squared
        return -squared / (2 * self.std.square()) - self.std.log() - HALF_LOG_TWO_PI

    def kl(self, reference: "Transition") -> Float[Tensor, " B"]:
        """Return KL(self || reference) of Gaussians with equal std, **mean** over latent elements:

            mean_d[ (mean - mean_ref)^2 / (2 std^2) ]

        A kernel's std does not depend on the adapter, so policy and reference have the same std. The published code of
        Flow-GRPO divides by 2 g^2 instead (std without sqrt(h)); its value is this value times h.
        """
        squared = (self.mean - reference.mean).square().flatten(1).mean(1)
        return squared / (2 * self.std.square())


def flow_sde(start: Start, *, sigma_first: float, noise_level: float) -> Transition:
    """Flow-GRPO's SDE (arXiv 2505.05470): an SDE with the same marginals as the probability-flow ODE.

    mean = x - h [v + g^2 / (2t) x1],  std = g sqrt(h),  g^2 = a^2 t / (1 - t~)

    Args:
        sigma_first: sigma_1 of the schedule; it replaces t in 1 - t where t is 1.
        noise_level: a, above 0.

    Returns:
        The transition, mean [B, ...] and std [B].
    """
    variance = noise_level**2 * start.sigma / (1 - _away_from_one(start.sigma, sigma_first))
    return _score_sde(start, diffusion=variance)


def dance_sde(start: Start, *, noise_level: float) -> Transition:
    """DanceGRPO's SDE (arXiv 2505.07818): the form of Flow-SDE with the same diffusion at every sigma.

    mean = x - h [v + eta^2 / (2t) x1],  std = eta sqrt(h)

    Args:
        noise_level: eta, above 0. A separate eta for every step gives the SDE of DenseGRPO (arXiv 2601.20218).

    Returns:
        The transition, mean [B, ...] and std [B].
    """
    return _score_sde(start, diffusion=torch.full_like(start.sigma, noise_level).square())


def ddim_sde(start: Start, *, sigma_first: float, noise_level: float) -> Transition:
    """The DDIM-inspired SDE of Stepwise-Flow-GRPO (arXiv 2603.28718): less noise in the first and last steps.

    mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1,  std = eta t' sqrt(1 - t~)

    Args:
        sigma_first: sigma_1 of the schedule; it replaces t where t is 1. 1.0 gives the literal formula, with std 0.
        noise_level: eta in (0, 1], so that std <= t'.

    Returns:
        The transition, mean [B, ...] and std [B].
    """
    std = noise_level * start.sigma_next * (1 - _away_from_one(start.sigma, sigma_first)).sqrt()
    return _preserving(start, std=std)


def cps(start: Start, *, noise_level: float, log_prob_form: LogProbForm = "gaussian") -> Transition:
    """Coefficients-preserving sampling (CPS, arXiv 2509.05952): x' holds as much noise as the schedule states.

    mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1,  std = t' sin(a pi / 2)

    Args:
        noise_level: a in (0, 1]; 1 replaces all of the old noise.
        log_prob_form: form of the transition's log-prob.

    Returns:
        The transition, mean [B, ...] and std [B].
    """
    std = math.sin(noise_level * math.pi / 2) * start.sigma_next
    return replace(_preserving(start, std=std), log_prob_form=log_prob_form)


def ode(start: Start) -> Transition:
    """Euler's step of the probability-flow ODE: mean = x - h v, std = 0."""
    mean = start.latents - per_sample(start.step_size, start.latents) * start.velocity
    return Transition(mean=mean, std=torch.zeros_like(start.sigma))


def _away_from_one(sigma: Float[Tensor, " B"], sigma_first: float) -> Float[Tensor, " B"]:
    return torch.where(sigma == 1, torch.full_like(sigma, sigma_first), sigma)


def _score_sde(start: Start, *, diffusion: Float[Tensor, " B"]) -> Transition:
    """mean = x - h [v + g^2 / (2t) x1], std = g sqrt(h), where `diffusion` is g^2."""
    h, noise = start.step_size, start.noise
    drift = start.velocity + per_sample(diffusion / (2 * start.sigma), noise) * noise
    return Transition(mean=start.latents - per_sample(h, drift) * drift, std=(diffusion * h).sqrt())


def _preserving(start: Start, *, std: Float[Tensor, " B"]) -> Transition:
    """mean = (1 - t') x0 + sqrt(t'^2 - std^2) x1: kept and added noise together have the schedule's std t'."""
    clean, noise = start.clean, start.noise
    kept = (start.sigma_next.square() - std.square()).sqrt()
    return Transition(mean=per_sample(1 - start.sigma_next, clean) * clean + per_sample(kept, noise) * noise, std=std)


def clean_estimate(
    *, latents: Float[Tensor, "B ..."], velocity: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """Estimate the clean latents: x0 = x - sigma v.

    Two papers write x - t x1 with an estimate x1, which contradicts their own path unless x1 means the velocity.

    Args:
        latents: states x [B, ...].
        velocity: v at these states [B, ...].
        sigma: noise level of each state, in [0, 1] [B].

    Returns:
        x0 [B, ...].
    """
    return latents - per_sample(sigma, latents) * velocity


def per_sample(scalar: Float[Tensor, " B"], like: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """Reshape one number per sample [B] to [B, 1, ...], so that it broadcasts over the latent dimensions of `like`."""
    return scalar.view(-1, *(1,) * (like.ndim - 1))
