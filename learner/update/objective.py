"""The loss of one micro-batch: the policy term of the configured objective, and the KL to the model without adapter.

`Objective` runs the policy; the functions below it are the formulas, pure and in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flow.adapter.lora import Lora
from flow.maths.transition import Transition
from flow.models.contract import Conditioning
from flow.policy import FlowPolicy
from learner.update.micro_batches import MicroBatch
from learner.update.own import PolicyStep, own_loss
from protocol.config.learning import KlConfig, LearnerConfig
from protocol.errors import ContractError
from protocol.ground.import_path import is_path


@dataclass(frozen=True)
class PairLosses:
    """Losses of one micro-batch's pairs."""

    loss: Float[Tensor, " N"]
    """The minimised loss, carries the gradient; 0 where the pair does not count."""
    ratio: Float[Tensor, " N"] | None
    """New over old density, exactly 1 before the first update; for `guarded` GRPO-Guard's ratio; None for an objective
    without densities."""
    outside: Bool[Tensor, " N"] | None
    """Whether the pair has left the clip range, or for `masked` the divergence bound; None if `ratio` is None."""
    kl: Float[Tensor, " N"]
    """Divergence from the model without adapter; 0 when the term is off, and where the pair does not count."""
    valid: Bool[Tensor, " N"]
    """Which pairs count."""
    numbers: Mapping[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """Further numbers of the objective by name, without a gradient, of all pairs."""

    def detached(self) -> "PairLosses":
        """Return the same numbers without their gradients."""
        ratio = None if self.ratio is None else self.ratio.detach()
        return replace(self, loss=self.loss.detach(), ratio=ratio)


@dataclass(frozen=True)
class Objective:
    """The loss of the (trajectory, step) pairs.

    Policy and reference run with the same conditioning and guidance, so both give guided velocities.
    """

    policy: FlowPolicy
    lora: Lora
    config: LearnerConfig

    def __call__(self, micro_batch: MicroBatch) -> PairLosses:
        """Run the policy, and the reference if the KL has a weight, over one micro-batch."""
        conditioning = self.policy.conditioning(
            micro_batch.prompt.text, micro_batch.prompt.negative, micro_batch.prompt.conditions
        )
        reference = self._reference(micro_batch, conditioning) if self.config.needs_reference else None
        transition, velocity = self.policy.transition(
            micro_batch.latents, micro_batch.k, conditioning=conditioning, rows_per_state=micro_batch.rows_per_state
        )
        loss, ratio, outside = self._policy_term(micro_batch, transition)
        kl, numbers = torch.zeros_like(loss), {}
        if reference is not None:
            kl = divergence(
                self.config.kl,
                policy=(transition, velocity),
                reference=reference,
                step_size=self.policy.step_size(micro_batch.k),
            )
            excess, ratios = norm_excess(velocity, reference[1])
            numbers["velocity_norm_ratio"] = ratios.detach()
            loss = loss + self.config.kl.weight * kl
            if self.config.norm_guard:
                loss = loss + self.config.norm_guard * excess
        return PairLosses(
            loss=loss * micro_batch.valid,
            ratio=ratio,
            outside=outside,
            kl=kl.detach() * micro_batch.valid,
            valid=micro_batch.valid,
            numbers=numbers,
        )

    def _policy_term(
        self, micro_batch: MicroBatch, transition: Transition
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Bool[Tensor, " N"]]:
        """Return loss, ratio and whether each pair has left the trust region."""
        config = self.config
        log_ratio = transition.log_prob(micro_batch.next_latents) - micro_batch.old_log_prob
        if is_path(config.objective):
            step = PolicyStep(
                k=micro_batch.k,
                step_size=self.policy.step_size(micro_batch.k),
                mean=transition.mean,
                std=transition.std,
                next_latents=micro_batch.next_latents,
                config=config,
            )
            loss, ratio = own_loss(config.objective, log_ratio, micro_batch.advantages, step), log_ratio.exp()
            return loss, ratio, (ratio.detach() - 1).abs() > config.clip_range
        if config.objective == "masked":
            old = Transition(mean=self._old_mean(micro_batch), std=transition.std)
            divergence = old.kl(transition)
            loss, ratio = masked_surrogate(
                log_ratio,
                advantages=micro_batch.advantages,
                divergence=divergence,
                bound=config.divergence_bound,
            )
            return loss, ratio, divergence > config.divergence_bound
        if config.objective == "guarded":
            old_mean = self._old_mean(micro_batch)
            loss, ratio = guarded_surrogate(
                guarded_log_ratio(log_ratio, mean=transition.mean, old_mean=old_mean, std=transition.std),
                advantages=micro_batch.advantages,
                clip_range=config.clip_range,
                step_size=self.policy.step_size(micro_batch.k),
            )
        else:
            loss, ratio = clipped_surrogate(log_ratio, advantages=micro_batch.advantages, clip_range=config.clip_range)
        return loss, ratio, (ratio.detach() - 1).abs() > config.clip_range

    def _old_mean(self, micro_batch: MicroBatch) -> Float[Tensor, "N C H W"]:
        if micro_batch.old_mean is None:
            raise ContractError(f"objective {self.config.objective} needs the means of the rollout, got none")
        return micro_batch.old_mean

    @torch.no_grad()
    def _reference(
        self, micro_batch: MicroBatch, conditioning: tuple[Conditioning, ...]
    ) -> tuple[Transition, Float[Tensor, "N C H W"]]:
        with self.lora.adapter_disabled():
            return self.policy.transition(
                micro_batch.latents, micro_batch.k, conditioning=conditioning, rows_per_state=micro_batch.rows_per_state
            )


def divergence(
    config: KlConfig,
    *,
    policy: tuple[Transition, Float[Tensor, "B ..."]],
    reference: tuple[Transition, Float[Tensor, "B ..."]],
    step_size: float,
) -> Float[Tensor, " B"]:
    """Compute KL(policy || reference) of one step by the config's convention.

    `full`: mean_d (mean - mean_ref)^2 / (2 std^2). `no_dt`: the same over 2 g^2 with std = g sqrt(h), which is h times
    `full`; released code of Flow-GRPO. `velocity`: mean_d (v - v_ref)^2 (Flow-Factory).

    Args:
        config: its `rule` is the convention.
        policy: transition and velocity of the trained policy.
        reference: transition and velocity of the KL's reference.
        step_size: h.

    Returns:
        One KL for each pair [B], in nats per latent element for `full`.
    """
    if config.rule == "velocity":
        return (policy[1] - reference[1]).square().flatten(1).mean(1)
    full = policy[0].kl(reference[0])
    return full * step_size if config.rule == "no_dt" else full


def norm_excess(
    velocity: Float[Tensor, "B ..."], reference: Float[Tensor, "B ..."]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """NormGuard's hinge (arXiv 2606.27771): max(0, ||v|| - ||v_ref||), with ||v|| = sqrt(mean_d v^2).

    RL makes velocities longer than the reference's, which earns no reward and costs quality. The root mean
    square is ours: the paper's weight and its norm, a sum or a mean, are not known.

    Args:
        velocity: v, carries the gradient [B, ...].
        reference: v_ref [B, ...].

    Returns:
        The hinge, and ||v|| / ||v_ref||, of each pair [B].
    """
    length, reference_length = (
        torch.linalg.vector_norm(each.flatten(1), dim=1) / each[0].numel() ** 0.5 for each in (velocity, reference)
    )
    return (length - reference_length).clamp(min=0), length / reference_length


def clipped_surrogate(
    log_ratio: Float[Tensor, " B"], *, advantages: Float[Tensor, " B"], clip_range: float
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """PPO's clipped loss and its ratio (arXiv 1707.06347), as in Flow-GRPO (arXiv 2505.05470).

        rho = exp(log_prob - old_log_prob)
        loss = max(-A rho, -A clip(rho, 1 - c, 1 + c))

    Args:
        log_ratio: log_prob - old_log_prob [B]: under the trained policy, with the gradient, and under the policy that
            rolled out; means over latent elements.
        advantages: A [B].
        clip_range: c; small (1e-5 to 1e-3), since log-probs are means over thousands of elements.

    Returns:
        Loss [B] and ratio [B] of each pair.
    """
    ratio = log_ratio.exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)), ratio


def guarded_log_ratio(
    log_ratio: Float[Tensor, " B"],
    *,
    mean: Float[Tensor, "B ..."],
    old_mean: Float[Tensor, "B ..."],
    std: Float[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """GRPO-Guard's log-ratio (arXiv 2510.22319): centred at 0, and its spread is not proportional to 1 / std.

        (log_prob - log_prob_old + mean_d (mean - mean_old)^2 / (2 q^2)) q,  q the std of the whole step

    With x' = mean_old + q e the plain log-ratio is -(mean - mean_old)^2 / (2 q^2) + (mean - mean_old) e / q, averaged
    over latent elements: below 0 on average, and the steeper the smaller q is. Here only mean_d of (mean - mean_old) e
    remains: it has the same spread for all steps whose means move equally far. To give equal changes of the velocity
    the same spread, `guarded_surrogate` also divides by h.

    Args:
        log_ratio: as in `clipped_surrogate` [B].
        mean: mean of the step under the trained policy [B, ...].
        old_mean: mean of the step under the policy that rolled out [B, ...].
        std: q = g sqrt(h) [B].

    Returns:
        The log-ratio of each pair [B].
    """
    drift = (mean - old_mean).square().flatten(1).mean(1)
    return (log_ratio + drift / (2 * std.square())) * std


def guarded_surrogate(
    log_ratio: Float[Tensor, " B"], *, advantages: Float[Tensor, " B"], clip_range: float, step_size: float
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """GRPO-Guard's loss and ratio: the clipped surrogate of its ratio, divided by the step size h.

    The gradient of this ratio is proportional to h; the division gives every step the same weight.

    Args:
        log_ratio: from `guarded_log_ratio` [B].
        advantages: A [B].
        clip_range: c of `clipped_surrogate`.
        step_size: h.

    Returns:
        Loss [B] and ratio [B] of each pair.
    """
    loss, ratio = clipped_surrogate(log_ratio, advantages=advantages, clip_range=clip_range)
    return loss / step_size, ratio


def masked_surrogate(
    log_ratio: Float[Tensor, " B"],
    *,
    advantages: Float[Tensor, " B"],
    divergence: Float[Tensor, " B"],
    bound: float,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Flow-DPPO's loss and ratio (arXiv 2606.11025): a mask by the exact divergence of the step, no clip of the ratio.

        rho = exp(log_prob - log_prob_old)
        loss = -A rho, constant where D > tau and the pair would move on: A > 0 with rho > 1, or A < 0 with rho < 1

    The ratio is one noisy sample of how far the policy has moved; D = mean_d (mean - mean_old)^2 / (2 std^2) is exact.

    Args:
        log_ratio: as in `clipped_surrogate` [B].
        advantages: A [B].
        divergence: D = KL(old || new) of each step [B], in nats per latent element; no gradient flows through it.
        bound: tau, in the same unit.

    Returns:
        Loss [B] and ratio [B] of each pair; a masked pair keeps its value and has no gradient.
    """
    ratio = log_ratio.exp()
    loss = -advantages * ratio
    moves_on = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return torch.where((divergence > bound) & moves_on, loss.detach(), loss), ratio
