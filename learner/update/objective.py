"""The loss of one micro-batch: the policy term of the configured objective, and the KL to the model without adapter."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flow.adapter.lora import Lora
from flow.maths.interpolant import per_sample
from flow.maths.transition import Transition
from flow.models.contract import Conditioning
from flow.policy import FlowPolicy
from learner.update.loss import clipped_surrogate, guarded_log_ratio, guarded_surrogate, weighted_regression
from learner.update.micro_batches import MicroBatch
from protocol.config.learning import KlConfig, LearnerConfig
from protocol.errors import ContractError


@dataclass(frozen=True)
class PairLosses:
    """Of one micro-batch's pairs."""

    loss: Float[Tensor, " N"]
    """What is minimised, carries the gradient; 0 where the pair does not count."""
    ratio: Float[Tensor, " N"]
    """New over old density, exactly 1 before the first update; for `guarded` GRPO-Guard's."""
    kl: Float[Tensor, " N"]
    """Divergence from the model without adapter; 0 when the term is off."""


@dataclass(frozen=True)
class Objective:
    """The loss of the (trajectory, step) pairs. Made once by the learner.

    Policy and reference are asked with the same conditioning and guidance, so both are the guided velocity.
    """

    policy: FlowPolicy
    lora: Lora
    config: LearnerConfig

    def __call__(self, micro_batch: MicroBatch) -> PairLosses:
        """The losses of one micro_batch."""
        conditioning = self.policy.conditioning(micro_batch.prompt.text, micro_batch.prompt.negative)
        reference = self._reference(micro_batch, conditioning) if self.config.kl.weight else None
        transition, velocity = self.policy.transition(micro_batch.latents, micro_batch.k, conditioning=conditioning)
        loss, ratio = self._policy_term(micro_batch, transition, velocity)
        kl = torch.zeros_like(loss)
        if reference is not None:
            kl = divergence(
                self.config.kl,
                policy=(transition, velocity),
                reference=reference,
                step=self._step_size(micro_batch.k),
            )
            loss = loss + self.config.kl.weight * kl
        return PairLosses(loss=loss * micro_batch.valid, ratio=ratio, kl=kl.detach() * micro_batch.valid)

    def _policy_term(
        self, micro_batch: MicroBatch, transition: Transition, velocity: Tensor
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        log_prob = transition.log_prob(micro_batch.next_latents)
        if self.config.objective == "distillation":
            target = self._target(micro_batch)
            loss = weighted_regression(velocity=velocity, target=target, advantages=micro_batch.advantages)
            return loss, (log_prob.detach() - micro_batch.old_log_prob).exp()
        if self.config.objective == "guarded":
            if micro_batch.old_mean is None:
                raise ContractError("objective guarded needs the means of the rollout, got none")
            log_ratio = guarded_log_ratio(
                log_prob=log_prob,
                old_log_prob=micro_batch.old_log_prob,
                mean=transition.mean,
                old_mean=micro_batch.old_mean,
                std=transition.std,
            )
            return guarded_surrogate(
                log_ratio=log_ratio,
                advantages=micro_batch.advantages,
                clip_range=self.config.clip_range,
                step=self._step_size(micro_batch.k),
            )
        return clipped_surrogate(
            log_prob=log_prob,
            old_log_prob=micro_batch.old_log_prob,
            advantages=micro_batch.advantages,
            clip_range=self.config.clip_range,
        )

    @torch.no_grad()
    def _reference(
        self, micro_batch: MicroBatch, conditioning: tuple[Conditioning, ...]
    ) -> tuple[Transition, Float[Tensor, "N C H W"]]:
        with self.lora.adapter_disabled():
            return self.policy.transition(micro_batch.latents, micro_batch.k, conditioning=conditioning)

    def _target(self, micro_batch: MicroBatch) -> Float[Tensor, "N C H W"]:
        if micro_batch.target is None:
            raise ContractError("objective distillation needs the completions of the rollout, got none")
        sigma = self.policy.sigmas[micro_batch.k].expand(len(micro_batch.latents)).to(micro_batch.latents.device)
        return (micro_batch.latents - micro_batch.target) / per_sample(sigma, micro_batch.latents)

    def _step_size(self, k: int) -> float:
        return (self.policy.sigmas[k] - self.policy.sigmas[k + 1]).item()


def divergence(
    config: KlConfig,
    *,
    policy: tuple[Transition, Float[Tensor, "B ..."]],
    reference: tuple[Transition, Float[Tensor, "B ..."]],
    step: float,
) -> Float[Tensor, " B"]:
    """KL(policy || reference) of one step by the config's convention; transition and velocity of each side.

    `full`: mean_d (mean - mean_ref)^2 / (2 std^2). `no_dt`: the same over 2 g^2 with std = g sqrt(h), which is h times
    `full`; released code of Flow-GRPO and TP-GRPO. `velocity`: mean_d (v - v_ref)^2 (Flow-Factory).

    Args:
        step: h.
    """
    if config.rule == "velocity":
        return (policy[1] - reference[1]).square().flatten(1).mean(1)
    full = policy[0].kl(reference[0])
    return full * step if config.rule == "no_dt" else full
