"""The parity probe: before an update, learner and rollout actors must compute the same log-probs, or clean latents.

Both run the same code on the same numbers with the same adapter, so the ratio is exactly 1 on equal machines. Another
precision, another attention kernel or a wrong adapter on one side shows here at once, and not weeks later as a reward
that stays flat.
"""

import math

import torch

from flow.maths.noise import INITIAL, trajectory_noise
from flow.policy import FlowPolicy
from protocol.errors import ContractError, NonFiniteError, ParityError
from protocol.messages import Rollout


@torch.no_grad()
def probe_parity(policy: FlowPolicy, rollout: Rollout, *, bound: float, device: torch.device) -> dict[str, float]:
    """Replay every stochastic step of a shard that was rolled out with the learner's current adapter.

    Args:
        policy: the learner's policy, before the update.
        bound: largest |ratio - 1| that is accepted.

    Returns:
        `probe/ratio_deviation`, the largest |ratio - 1|.

    Raises:
        ParityError: the deviation is above `bound`; the message names the step.
        NonFiniteError: a log-prob is NaN or infinite.
    """
    if rollout.log_probs is None:
        raise ContractError("a rollout without log-probs has no ratio; probe its clean latents")
    prompt = rollout.request.prompt
    conditioning = policy.conditioning(prompt.text, prompt.negative, prompt.conditions)
    deviations: list[float] = []
    strides = policy.strides(rollout.steps)
    for column, k in enumerate(rollout.steps):
        rows = slice(None, None, strides.get(k, 1))
        replayed = (rollout.latents[rows, k], rollout.latents[rows, k + 1], rollout.log_probs[rows, column])
        latents, following, old = (torch.from_numpy(array.copy()).to(device) for array in replayed)
        rows_per_state = policy.rows_per_state(k, rollout.steps, len(latents))
        transition, _ = policy.transition(latents, k, conditioning=conditioning, rows_per_state=rows_per_state)
        log_probs = policy.log_prob(transition, following, rows_per_state=rows_per_state)
        deviations.append(((log_probs - old).exp() - 1).abs().max().item())
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


@torch.no_grad()
def probe_clean(
    policy: FlowPolicy, rollout: Rollout, *, seed: int, bound: float, device: torch.device
) -> dict[str, float]:
    """Replay a shard's ODE from its keyed initial noise; for trajectories that hold clean latents only.

    Args:
        policy: the learner's policy with the adapter that rolled out.
        bound: largest |difference| of a latent element that is accepted.

    Returns:
        `probe/latent_deviation`, the largest |difference|.

    Raises:
        ParityError: the deviation is above `bound`.
        NonFiniteError: the replay is NaN or infinite.
    """
    request = rollout.request
    latents = trajectory_noise(
        seed=seed,
        iteration=request.iteration,
        group=request.group,
        members=range(request.first_member, request.first_member + request.members),
        step=INITIAL,
        shape=policy.backbone.latent_shape,
    ).to(device)
    conditioning = policy.conditioning(request.prompt.text, request.prompt.negative, request.prompt.conditions)
    latents = policy.tail(0, latents, conditioning)
    held = torch.from_numpy(rollout.latents[:, -1].copy()).to(device)
    deviation = (latents - held).abs().max().item()
    if not math.isfinite(deviation):
        raise NonFiniteError("the clean latents of a probe must be finite on both sides")
    if deviation > bound:
        raise ParityError(
            f"learner and rollout must agree on clean latents to learner.probe_bound {bound:g}, got a difference of"
            f" {deviation:.2e}: give both the same kind of device, library versions and model.dtype"
        )
    return {"probe/latent_deviation": deviation}
