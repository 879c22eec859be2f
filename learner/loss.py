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
