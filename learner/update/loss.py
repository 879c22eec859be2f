"""The policy objective, pure and in float32."""

import torch
from jaxtyping import Float
from torch import Tensor


def clipped_surrogate(
    *,
    log_prob: Float[Tensor, " B"],
    old_log_prob: Float[Tensor, " B"],
    advantages: Float[Tensor, " B"],
    clip_range: float,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Loss and ratio of every (trajectory, step) pair (PPO, arXiv 1707.06347; Flow-GRPO, arXiv 2505.05470).

        rho = exp(log_prob - old_log_prob)
        loss = max(-A rho, -A clip(rho, 1 - c, 1 + c))

    Args:
        log_prob: under the trained policy, mean over latent elements, carries the gradient.
        old_log_prob: under the policy that drew the sample.
        advantages: A.
        clip_range: c; small (1e-5 to 1e-3), since log-probs are means over thousands of elements.
    """
    ratio = (log_prob - old_log_prob).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)), ratio


def guarded_log_ratio(
    *,
    log_prob: Float[Tensor, " B"],
    old_log_prob: Float[Tensor, " B"],
    mean: Float[Tensor, "B ..."],
    old_mean: Float[Tensor, "B ..."],
    std: Float[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """GRPO-Guard's log-ratio (arXiv 2510.22319): centred at 0, its spread no longer that of 1 / std.

        (log_prob - log_prob_old + mean_d (mean - mean_old)^2 / (2 q^2)) q,  q the std of the whole step

    With x' = mean_old + q e the plain log-ratio is -(mean - mean_old)^2 / (2 q^2) + (mean - mean_old) e / q, averaged
    over latent elements: below 0 on average, and the steeper the smaller q. What remains here is mean_d of
    (mean - mean_old) e: one spread for all steps where the means move alike; for an equal change of the velocity it
    takes the division by h in `guarded_surrogate`.

    Args:
        mean: of the step under the trained policy.
        old_mean: of the step under the policy that drew the sample.
        std: q = g sqrt(h).
    """
    drift = (mean - old_mean).square().flatten(1).mean(1)
    return (log_prob - old_log_prob + drift / (2 * std.square())) * std


def guarded_surrogate(
    *,
    log_ratio: Float[Tensor, " B"],
    advantages: Float[Tensor, " B"],
    clip_range: float,
    step: float,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """GRPO-Guard's loss and ratio: the clipped surrogate of its ratio, divided by the step size h.

    The gradient of this ratio is proportional to h; the division gives every step the same weight.

    Args:
        step: h.
    """
    nothing = torch.zeros_like(log_ratio)
    loss, ratio = clipped_surrogate(
        log_prob=log_ratio, old_log_prob=nothing, advantages=advantages, clip_range=clip_range
    )
    return loss / step, ratio


def weighted_regression(
    *, velocity: Float[Tensor, "B ..."], target: Float[Tensor, "B ..."], advantages: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """max(A, 0) mean_d (v - target)^2: towards where good steps led, without a ratio.

    Ours, after Stepwise-Flow-GRPO's "ODE-based progressive distillation variant", of which no formula is public.

    Args:
        target: (x_k - C) / sigma_k, the straight velocity to the completion C of the point behind the step.
    """
    return advantages.clamp(min=0) * (velocity - target).square().flatten(1).mean(1)
