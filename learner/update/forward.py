"""The objectives of the forward process: they add new noise to clean latents and train the velocity there.

They need neither log-probs nor the trajectory, so the rollout may be an ODE. `ForwardObjective` runs the policy; the
functions below `FORMULAS` are the mathematics, pure and in float32, but for likelihoods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flow.adapter.lora import Lora
from flow.maths.transition import clean_estimate, per_sample
from flow.policy import FlowPolicy
from learner.update.ema import OldAdapter
from learner.update.micro_batches import NoisedBatch
from learner.update.objective import PairLosses, norm_excess
from protocol.config.learning import LearnerConfig

LEAST_WEIGHT = 1e-5
"""Lower bound of the mean error that `negative_aware` divides by, as in DiffusionNFT's released code."""
DELTA = 1e-10
"""Added to the matching loss before its power, as in AWM's released code: the power has no finite slope at 0."""


@dataclass(frozen=True)
class View:
    """The states of one batch's pairs, and the velocities there."""

    batch: NoisedBatch
    sigma: Float[Tensor, " B"]
    noised: Float[Tensor, "B ..."]
    velocity: Float[Tensor, "B ..."]
    """v of the trained policy, carries the gradient."""
    old: Float[Tensor, "B ..."] | None
    """v_old of the adapter `old`, if the objective compares it."""
    reference: Float[Tensor, "B ..."] | None
    """v_ref of the model without adapter, if the config needs it."""
    guidance: float

    @property
    def matching(self) -> Float[Tensor, " B"]:
        """l = mean_d (v - (x1 - x0))^2 of the trained policy."""
        return _matching(self.velocity, self.batch)

    def likelihood(self, velocity: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
        """Return the likelihood of the clean latents by this velocity."""
        return likelihood(
            velocity=velocity,
            noised=self.noised,
            clean=self.batch.latents,
            sigma=self.sigma,
            guidance=self.guidance,
        )


@dataclass(frozen=True)
class ForwardObjective:
    """The loss of (trajectory, step) pairs by an objective of the forward process."""

    policy: FlowPolicy
    lora: Lora
    config: LearnerConfig
    old: OldAdapter
    advantage_clip: float
    """A_max, the bound of the advantages; `nft` and `awm` divide them by it."""

    def __call__(self, batch: NoisedBatch) -> PairLosses:
        """Add noise of the step's level to the clean latents; run the policy there and what it is compared with."""
        view = self._seen(batch)
        loss, numbers = FORMULAS[self.config.objective](view, self.config, self.advantage_clip)
        if view.old is not None:
            numbers["old_distance"] = _distance(view.velocity, view.old)
        kl = torch.zeros_like(loss)
        if view.reference is not None:
            kl = _distance(view.velocity, view.reference)
            excess, numbers["velocity_norm_ratio"] = norm_excess(view.velocity, view.reference)
            loss = loss + self.config.kl.weight * kl
            if self.config.norm_guard:
                loss = loss + self.config.norm_guard * excess
        return PairLosses(
            loss=loss * batch.valid,
            ratio=None,
            outside=None,
            kl=kl.detach() * batch.valid,
            valid=batch.valid,
            numbers={name: values.detach() for name, values in numbers.items()},
        )

    @torch.no_grad()
    def weighed(self, batch: NoisedBatch) -> NoisedBatch:
        """Give a whole group DGPO's weight, repeated for each member.

        The policy is compared with the KL's reference, or with `old` (`forward.compared`).
        """
        view = self._seen(batch)
        compared = view.reference if self.config.forward.compared == "base" else view.old
        assert compared is not None
        weight = preference_weight(
            matching=view.matching,
            reference=_matching(compared, batch),
            advantages=batch.advantages,
            valid=batch.valid,
            beta=self.config.forward.preference,
        )
        return replace(batch, weight=weight.expand(len(batch.latents)))

    def _seen(self, batch: NoisedBatch) -> View:
        """Run the policy at the states of the pairs, and without a gradient what it is compared with."""
        config = self.config
        conditioning = self.policy.conditioning(batch.prompt.text, batch.prompt.negative, batch.prompt.conditions)
        sigma = self.policy.sigma(batch.k, batch.latents)
        level = per_sample(sigma, batch.latents)
        noised = (1 - level) * batch.latents + level * batch.noise
        old = reference = None
        with torch.no_grad():
            if config.objective != "awm" or config.old.weight:
                with self.lora.holding(self.old.tensors):
                    old = self.policy.velocity(noised, sigma, conditioning)
            if config.needs_reference:
                with self.lora.adapter_disabled():
                    reference = self.policy.velocity(noised, sigma, conditioning)
        velocity = self.policy.velocity(noised, sigma, conditioning)
        return View(batch, sigma, noised, velocity, old, reference, guidance=max(1.0, self.policy.guidance))


Loss = Callable[[View, LearnerConfig, float], tuple[Float[Tensor, " B"], dict[str, Float[Tensor, " B"]]]]
"""Returns the loss of each pair, without penalties, and `PairLosses.numbers`; the last argument is A_max."""


def _nft(view: View, config: LearnerConfig, most: float) -> tuple[Tensor, dict[str, Tensor]]:
    assert view.old is not None
    optimality = 0.5 + 0.5 * (view.batch.advantages / most).clamp(-1, 1)
    loss = negative_aware(
        velocity=view.velocity,
        old_velocity=view.old,
        noised=view.noised,
        clean=view.batch.latents,
        sigma=view.sigma,
        optimality=optimality,
        beta=config.forward.beta,
    )
    return most * loss, {"optimality": optimality}


def _awm(view: View, config: LearnerConfig, most: float) -> tuple[Tensor, dict[str, Tensor]]:
    strength = view.batch.advantages / most
    loss = strength * robust_matching(view.matching, sigma=view.sigma, power=config.forward.power)
    if view.old is not None:
        loss = loss + config.old.weight * _distance(view.velocity, view.old)
    return loss, {"matching": view.matching}


def _dgpo(view: View, config: LearnerConfig, _: float) -> tuple[Tensor, dict[str, Tensor]]:
    batch = view.batch
    assert batch.weight is not None
    assert view.old is not None
    matching, is_clipped = clipped_matching(
        view.matching,
        old=_matching(view.old, batch),
        advantages=batch.advantages,
        clip_range=config.forward.clip_range,
    )
    numbers = {"matching": matching, "group_weight": batch.weight, "clipped": is_clipped.float()}
    return batch.weight * batch.advantages * matching, numbers


def _elbo(view: View, config: LearnerConfig, _: float) -> tuple[Tensor, dict[str, Tensor]]:
    assert view.old is not None
    trained, old = view.likelihood(view.velocity), view.likelihood(view.old)
    loss = likelihood_loss(
        trained,
        old=old,
        advantages=view.batch.advantages,
        rule=config.forward.loss,
        has_ratio=config.forward.has_ratio,
    )
    return loss.float(), {"likelihood": trained.float(), "likelihood_growth": (trained - old).float()}


def _ram(view: View, config: LearnerConfig, _: float) -> tuple[Tensor, dict[str, Tensor]]:
    assert view.old is not None
    assert view.reference is not None
    loss = adjoint_matching(
        velocity=view.velocity,
        old_velocity=view.old,
        reference=view.reference,
        target=view.batch.noise - view.batch.latents,
        advantages=config.forward.multiplier * view.batch.advantages,
    )
    return loss, {}


FORMULAS: Mapping[str, Loss] = {"nft": _nft, "awm": _awm, "dgpo": _dgpo, "elbo": _elbo, "ram": _ram}
"""Loss by the name of the objective."""


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

    It is the slope of the logistic loss of one preference: for the members with A > 0, against the members with A < 0.
    The group's loss is then the mean of w A_i l_i, with w as a constant.

    Args:
        matching: l, the matching loss of each member at the group's noise [N].
        reference: l^ref, the matching loss of the policy to compare with [N].
        advantages: A [N].
        valid: which members count, G of them [N].
        beta: factor of the preference, above 0.

    Returns:
        w in (0, 1).
    """
    held = torch.where(valid, advantages * (matching - reference), 0.0).sum() / valid.sum().clamp(min=1)
    return torch.sigmoid(beta * held)


def clipped_matching(
    matching: Float[Tensor, " B"],
    *,
    old: Float[Tensor, " B"],
    advantages: Float[Tensor, " B"],
    clip_range: float,
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """DGPO's clip: a matching loss that has moved far enough in the direction of its advantage has no gradient.

        rho = exp(l_old - l); clipped where A > 0 and rho > 1 + c, or A <= 0 and rho < 1 - c

    Args:
        matching: l, carries the gradient [B].
        old: l_old, the same of the adapter `old` [B].
        advantages: A [B].
        clip_range: c, above 0.

    Returns:
        l, without a gradient where it is clipped, and where that is [B].
    """
    ratio = (old - matching.detach()).exp()
    is_clipped = torch.where(advantages > 0, ratio > 1 + clip_range, ratio < 1 - clip_range)
    return torch.where(is_clipped, matching.detach(), matching), is_clipped


def likelihood(
    *,
    velocity: Float[Tensor, "B ..."],
    noised: Float[Tensor, "B ..."],
    clean: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    guidance: float = 1.0,
) -> Float[Tensor, " B"]:
    """An estimate of the finished image's log-likelihood at one noise level (arXiv 2602.04663):

        l = -mean_d (x0(v) - x0)^2 / w / G,   w = mean_d |x0(v) - x0|, without a gradient

    x0(v) and w as in `negative_aware`. With guidance G the error grows with G, and so does l without the
    division. It is float64, because the difference of two likelihoods is small.

    Args:
        velocity: v [B, ...].
        noised: x, the states [B, ...].
        clean: x0, the clean latents in which the rollout ended [B, ...].
        sigma: noise level of each state [B].
        guidance: G, at least 1.

    Returns:
        l of each pair [B].
    """
    return -_error(velocity.double(), noised=noised, clean=clean, sigma=sigma) / guidance


def likelihood_loss(
    trained: Float[Tensor, " B"],
    *,
    old: Float[Tensor, " B"],
    advantages: Float[Tensor, " B"],
    rule: str,
    has_ratio: bool,
) -> Float[Tensor, " B"]:
    """Policy gradients of a likelihood (arXiv 2602.04663), with d = l - l_old and r = exp(d) without a gradient:

        epg    -r A l
        pepg   -r (A - d) l, d without a gradient
        par    r (A - d)^2 / 2

    `pepg` and `par` have the same gradient, -r (A - d) dl, and rest where d = A.

    Args:
        trained: l of the trained policy, carries the gradient [B].
        old: l_old of the adapter `old` [B].
        advantages: A [B].
        rule: one of the three.
        has_ratio: whether r is exp(d) or 1.

    Returns:
        The loss of each pair [B].
    """
    growth = trained - old
    ratio = growth.detach().exp() if has_ratio else 1.0
    if rule == "par":
        return ratio * (advantages - growth).square() / 2
    pull = advantages - growth.detach() if rule == "pepg" else advantages
    return -ratio * pull * trained


def adjoint_matching(
    *,
    velocity: Float[Tensor, "B ..."],
    old_velocity: Float[Tensor, "B ..."],
    reference: Float[Tensor, "B ..."],
    target: Float[Tensor, "B ..."],
    advantages: Float[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """Reinforce Adjoint Matching (arXiv 2605.10759): mean_d (v - [v_ref + A (v* - v_old)])^2, the bracket constant.

    A good image moves the target from the reference towards the image's own velocity, a bad one away from it.

    Args:
        velocity: v, carries the gradient [B, ...].
        old_velocity: v_old, of the adapter that rolled out [B, ...].
        reference: v_ref [B, ...].
        target: v* = x1 - x0, the velocity that leads to the clean latents [B, ...].
        advantages: A, times m [B].

    Returns:
        The loss of each pair [B].
    """
    aim = reference + per_sample(advantages, target) * (target - old_velocity)
    return _distance(velocity, aim)


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
    (1 - 2r) (2 sigma / w) (x - sigma v - x0) / D, as of matching weighted by 2r - 1.

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
    released -A exp(-s + s without a gradient), whose ratio is always 1, so its clip never acts.

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
    return _distance(velocity, batch.noise - batch.latents)


def _distance(one: Float[Tensor, "B ..."], other: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
    """mean_d (one - other)^2."""
    return (one - other).square().flatten(1).mean(1)


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
