"""The parity probe: before an update, learner and rollout actors must compute the same log-probs.

Both run the same code on the same numbers with the same adapter, so the ratio is exactly 1 on equal machines. Another
precision, another attention kernel or a wrong adapter on one side shows here at once, and not as a reward that stays
flat for weeks.
"""

import math

import torch

from flow.policy import FlowPolicy
from protocol.errors import NonFiniteError, ParityError
from protocol.messages import Rollout


@torch.no_grad()
def probe_parity(policy: FlowPolicy, rollout: Rollout, *, bound: float, device: torch.device) -> dict[str, float]:
    """Replay every stochastic step of a shard that was rolled out with the learner's present adapter.

    Args:
        policy: the learner's, before the update.
        rollout: the shard's trajectories.
        bound: largest |ratio - 1| that is accepted.
        device: the policy's.

    Returns:
        `probe/ratio_deviation`, the largest |ratio - 1|.

    Raises:
        ParityError: the deviation is above `bound`; the message names the step.
        NonFiniteError: a log-prob is NaN or infinite.
    """
    prompt = rollout.request.prompt
    conditioning = policy.conditioning(prompt.text, prompt.negative)
    deviations = [
        _deviation(policy, rollout, column, conditioning=conditioning, device=device)
        for column in range(len(rollout.steps))
    ]
    worst = max(range(len(deviations)), key=lambda column: (math.isnan(deviations[column]), deviations[column]))
    if not math.isfinite(deviations[worst]):
        raise NonFiniteError(f"the log-probs of step {rollout.steps[worst]} must be finite on both sides")
    if deviations[worst] > bound:
        raise ParityError(
            "learner and rollout must agree on log-probs to learner.probe_bound"
            f" {bound:g}, got a ratio that differs from 1 by {deviations[worst]:.2e} at step {rollout.steps[worst]}:"
            " give both the same kind of device, library versions and model.dtype"
        )
    return {"probe/ratio_deviation": deviations[worst]}


def _deviation(
    policy: FlowPolicy, rollout: Rollout, column: int, *, conditioning: tuple, device: torch.device
) -> float:
    k = rollout.steps[column]
    latents, following = (torch.from_numpy(rollout.latents[:, point].copy()).to(device) for point in (k, k + 1))
    transition, _ = policy.transition(latents, k, conditioning=conditioning)
    old = torch.from_numpy(rollout.log_probs[:, column].copy()).to(device)
    return ((transition.log_prob(following) - old).exp() - 1).abs().max().item()
