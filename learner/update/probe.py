"""The parity probe: before an update, learner and rollout actors must compute the same log-probs, or clean latents.

Both run the same code on the same numbers with the same adapter, so the ratio is exactly 1 on equal machines. Another
precision, another attention kernel or a wrong adapter on one side shows here at once, and not weeks later as a reward
that stays flat.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch

from flow.adapter.lora import Lora
from flow.maths.noise import INITIAL, trajectory_noise
from flow.models.pipeline import PipelineBackbone
from flow.pieces import even_pieces
from flow.policy import FlowPolicy
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ContractError, NonFiniteError, ParityError
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


def take_learner_batch(policy: FlowPolicy, lora: Lora, config: RunConfig, *, device: torch.device) -> None:
    """Let a policy cut its forwards as the learner does, if this device then computes a row with the rollout's bits.

    The rows, prompts and adapter that are compared are random, and the learner's forwards have a gradient. If both
    sides cut a shard alike, nothing is computed.

    Raises:
        ConfigError: a row differs.
    """
    rollout, learner = policy.forward_batch, policy.learner_batch
    policy.forward_batch = learner
    counts = [count for count in _states(policy, config) if even_pieces(count, rollout) != even_pieces(count, learner)]
    if not counts:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        latents = torch.randn(max(counts), *policy.backbone.latent_shape).to(device)
        adapter = {name: 0.02 * torch.randn(held.shape).to(device) for name, held in lora.parameters.items()}
        prompts = tuple(cast(PipelineBackbone, policy.backbone).example(1) for _ in range(config.model.rows))
    sigma = torch.full((len(latents),), 0.5, device=device)
    with lora.holding(adapter):
        for count in counts:
            policy.forward_batch = rollout
            with torch.no_grad():
                expected = policy.velocity(latents[:count], sigma[:count], prompts)
            policy.forward_batch = learner
            for piece in even_pieces(count, learner):
                found = policy.velocity(latents[piece], sigma[piece], prompts).detach()
                if not torch.equal(found, expected[piece]):
                    off = (found - expected[piece]).abs().max().item()
                    raise ConfigError(
                        f"learner.batch must leave each row the bits that it has in the rollout's batches of"
                        f" {rollout or count}, got {learner}, with which a velocity on this device is off by {off:.1e}:"
                        " leave it out"
                    )
    policy.evaluations = policy.gradient_evaluations = 0


def _states(policy: FlowPolicy, config: RunConfig) -> Iterator[int]:
    """Yield each number of different states that a micro-batch can have."""
    found = {config.group.shard}
    for group in range(policy.window_period):
        explored = policy.steps_of(seed=config.seed, iteration=0, group=group, shard=0)
        strides = policy.strides(explored)
        for k in explored:
            rows = math.ceil(config.group.shard / strides.get(k, 1))
            found.add(math.ceil(rows / policy.rows_per_state(k, explored, rows)))
    yield from sorted(found)
