"""Does the learner compute the log-probs that the rollout actors computed? Asked before an update, with equal adapter.

Rollout and learner run the same code on the same numbers, so the ratio is exactly 1 on equal machines. Another
precision, another attention kernel or a wrong adapter on one side shows here as a number, not weeks later as a flat
reward.
"""

import math
from collections.abc import Sequence

import torch

from flow.policy import FlowPolicy
from protocol.errors import NonFiniteError, ParityError
from protocol.messages import Rollout, ScoredGroup


@torch.no_grad()
def probe_parity(
    policy: FlowPolicy, groups: Sequence[ScoredGroup], *, version: int, bound: float, device: torch.device
) -> dict[str, float]:
    """Replay every stochastic step of the first shard that this very version drew.

    Returns:
        `probe/ratio_deviation`, the largest |ratio - 1|; nothing when all groups come from older versions.

    Raises:
        ParityError: the deviation is above `bound`; says at which step.
        NonFiniteError: a log-prob is NaN or infinite.
    """
    shards = ((group.prompt, shard.rollout) for group in groups for shard in group.shards)
    found = next(((prompt, rollout) for prompt, rollout in shards if rollout.request.adapter_version == version), None)
    if found is None:
        return {}
    prompt, rollout = found
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
            f"learner and rollout must agree on log-probs: the ratio at step {rollout.steps[worst]} is off 1 by"
            f" {deviations[worst]:.2e}, allowed is learner.probe_bound {bound:g}. Do both use the same kind of device,"
            " library versions and model.dtype?"
        )
    return {"probe/ratio_deviation": deviations[worst]}


def _deviation(
    policy: FlowPolicy, rollout: Rollout, column: int, *, conditioning: tuple, device: torch.device
) -> float:
    k = rollout.steps[column]
    latents, following = (torch.from_numpy(rollout.latents[:, place].copy()).to(device) for place in (k, k + 1))
    transition, _ = policy.transition(latents, k, conditioning=conditioning)
    old = torch.from_numpy(rollout.log_probs[:, column].copy()).to(device)
    return ((transition.log_prob(following) - old).exp() - 1).abs().max().item()
