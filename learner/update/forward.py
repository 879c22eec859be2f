"""The objectives of the forward process: they add new noise to clean latents and train the velocity there.

They need neither log-probs nor the trajectory, so the rollout may be an ODE. `ForwardObjective` runs the policy; the
functions below it are the formulas, pure and in float32.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flow.adapter.lora import Lora
from flow.maths.transition import clean_estimate, per_sample
from flow.models.contract import Conditioning
from flow.policy import FlowPolicy
from learner.update.ema import OldAdapter, ReferenceAdapter
from learner.update.micro_batches import NoisedBatch
from learner.update.objective import PairLosses, reference_of
from protocol.config.learning import LearnerConfig

LEAST_WEIGHT = 1e-5
"""Lower bound of the mean error that `negative_aware` divides by, as in DiffusionNFT's released code."""
DELTA = 1e-10
"""Added to the matching loss before its power, as in AWM's released code: the power has no finite slope at 0."""


@dataclass(frozen=True)
class ForwardObjective:
    """The loss of the (trajectory, step) pairs of `nft`, `awm` and `dgpo`."""

    policy: FlowPolicy
    lora: Lora
    config: LearnerConfig
    old: OldAdapter
    advantage_clip: float
    """A_max, the bound of the advantages; they are divided by it."""
    reference: ReferenceAdapter | None = None
    """As in `Objective`."""

    def __call__(self, batch: NoisedBatch) -> PairLosses:
        """Add noise of the step's level to the clean latents, and run the policy there and the ones to compare with."""
        config = self.config
        conditioning, sigma, noised = self._noised(batch)
        with torch.no_grad():
            old = reference = None
            if config.objective == "nft" or (config.objective == "awm" and config.old.weight):
                with self.lora.holding(self.old.tensors):
                    old = self.policy.velocity(noised, sigma, conditioning)
            if config.kl.weight:
                with reference_of(self.lora, self.reference):
                    reference = self.policy.velocity(noised, sigma, conditioning)
        velocity = self.policy.velocity(noised, sigma, conditioning)
        strength = batch.advantages / self.advantage_clip
        own = {}
        if config.objective == "nft":
            assert old is not None
            optimality = 0.5 + 0.5 * strength.clamp(-1, 1)
            loss = self.advantage_clip * negative_aware(
                velocity=velocity,
                old_velocity=old,
                noised=noised,
                clean=batch.latents,
                sigma=sigma,
                optimality=optimality,
                beta=config.forward.beta,
            )
            own["optimality"] = optimality
        elif config.objective == "dgpo":
            assert batch.weight is not None
            matching = _matching(velocity, batch)
            loss = batch.weight * batch.advantages * matching
            own |= {"matching": matching.detach(), "group_weight": batch.weight}
        else:
            matching = _matching(velocity, batch)
            loss = strength * robust_matching(matching, sigma=sigma, power=config.forward.power)
            own["matching"] = matching.detach()
        if old is not None:
            distance = (velocity - old).square().flatten(1).mean(1)
            own["old_distance"] = distance.detach()
            if config.objective == "awm":
                loss = loss + config.old.weight * distance
        kl = torch.zeros_like(loss)
        if reference is not None:
            kl = (velocity - reference).square().flatten(1).mean(1)
            kl = kl if batch.doubtful is None else kl * batch.doubtful
            loss = loss + config.kl.weight * kl
        return PairLosses(
            loss=loss * batch.valid,
            ratio=None,
            outside=None,
            kl=kl.detach() * batch.valid,
            valid=batch.valid,
            own=own,
        )

    @torch.no_grad()
    def group_weight(self, batch: NoisedBatch) -> Float[Tensor, " N"]:
        """Compute DGPO's weight of a whole group, repeated for each member; the policy is compared with `old`."""
        conditioning, sigma, noised = self._noised(batch)
        own = self.policy.velocity(noised, sigma, conditioning)
        with self.lora.holding(self.old.tensors):
            old = self.policy.velocity(noised, sigma, conditioning)
        weight = preference_weight(
            matching=_matching(own, batch),
            reference=_matching(old, batch),
            advantages=batch.advantages,
            valid=batch.valid,
            beta=self.config.forward.preference,
        )
        return weight.expand(len(batch.latents))

    def _noised(
        self, batch: NoisedBatch
    ) -> tuple[tuple[Conditioning, ...], Float[Tensor, " B"], Float[Tensor, "B ..."]]:
        """Return conditioning, noise levels and states of the pairs."""
        conditioning = self.policy.conditioning(batch.prompt.text, batch.prompt.negative)
        sigma = self.policy.sigma(batch.k, batch.latents)
        level = per_sample(sigma, batch.latents)
        return conditioning, sigma, (1 - level) * batch.latents + level * batch.noise


def preference_weight(
    *,
    matching: Float[Tensor, " N"],
    reference: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    valid: Bool[Tensor, " N"],
    beta: float,
) -> Float[Tensor, ""]:
    """DGPO's weight of a group (arXiv 2510.08425): near 1 if the policy prefers the wrong members, near 0 if the right.

        w = sigmoid(beta / G sum_i A_i (l_i - l_i^ref))

    It is the slope of the logistic loss of one preference: the members with A > 0 over those with A < 0. The group's
    loss is then the mean of w A_i l_i, with w as a constant.

    Args:
        matching: l, the matching loss of each member at the group's noise [N].
        reference: l^ref, the same of the policy to compare with [N].
        advantages: A [N].
        valid: which members count, G of them [N].
        beta: factor of the preference, above 0.

    Returns:
        w in (0, 1).
    """
    held = torch.where(valid, advantages * (matching - reference), 0.0).sum() / valid.sum().clamp(min=1)
    return torch.sigmoid(beta * held)


def negative_aware(
    *,
    velocity: Float[Tensor, "B ..."],
    old_velocity: Float[Tensor, "B ..."],
    noised: Float[Tensor, "B ..."],
    clean: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    optimality: Float[Tensor, " B"],
    beta: float,
) -> Float[Tensor, " B"]:
    """DiffusionNFT's loss (arXiv 2509.16117), with x0(v) = x - sigma v, the clean latents that a velocity leads to:

        v+ = (1 - beta) v_old + beta v,  v- = (1 + beta) v_old - beta v
        loss = [r mean_d (x0(v+) - x0)^2 / w+  +  (1 - r) mean_d (x0(v-) - x0)^2 / w-] / beta

    w+ and w- are mean_d |x0(v+-) - x0|, without a gradient. A good image (r = 1) pulls the velocity towards itself; a
    bad one (r = 0) pulls its mirror image v-, and so pushes the velocity away. At v = v_old the gradient is
    (1 - 2r) (2 sigma / w) (x - sigma v - x0) / D: that of matching weighted by 2r - 1.

    Args:
        velocity: v, carries the gradient [B, ...].
        old_velocity: v_old, of the adapter that rolled out [B, ...].
        noised: x, the states [B, ...].
        clean: x0, the clean latents in which the rollout ended [B, ...].
        sigma: noise level of each state [B].
        optimality: r in [0, 1] [B].
        beta: weight of v in v+, in (0, 1].

    Returns:
        The loss of each pair [B].
    """
    shift = beta * (velocity - old_velocity)
    positive = _error(old_velocity + shift, noised=noised, clean=clean, sigma=sigma)
    negative = _error(old_velocity - shift, noised=noised, clean=clean, sigma=sigma)
    return (optimality * positive + (1 - optimality) * negative) / beta


def robust_matching(matching: Float[Tensor, " B"], *, sigma: Float[Tensor, " B"], power: float) -> Float[Tensor, " B"]:
    """AWM's weighted matching loss (arXiv 2509.25050; `ghuber` in its released code):

        s = sigma [(l + delta)^p - delta^p] / p,  l = mean_d (v - (x1 - x0))^2,  delta = 1e-10

    Large errors weigh less: ds/dl = sigma (l + delta)^(p - 1). Multiplied by the advantage, s has the gradient of the
    released -A exp(-s + s without a gradient), whose ratio is always 1.

    Args:
        matching: l, carries the gradient [B].
        sigma: noise level of each pair [B].
        power: p in (0, 1].

    Returns:
        s of each pair [B].
    """
    return sigma * ((matching + DELTA).pow(power) - DELTA**power) / power


def _matching(velocity: Float[Tensor, "B ..."], batch: NoisedBatch) -> Float[Tensor, " B"]:
    """mean_d (v - (x1 - x0))^2."""
    return (velocity - (batch.noise - batch.latents)).square().flatten(1).mean(1)


def _error(
    velocity: Float[Tensor, "B ..."],
    *,
    noised: Float[Tensor, "B ..."],
    clean: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """mean_d (x0(v) - x0)^2 / w, with w = mean_d |x0(v) - x0| without a gradient."""
    difference = (clean_estimate(latents=noised, velocity=velocity, sigma=sigma) - clean).flatten(1)
    weight = difference.detach().abs().mean(1).clamp(min=LEAST_WEIGHT)
    return difference.square().mean(1) / weight
