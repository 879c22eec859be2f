"""Scored groups of the tiny pipeline, one iteration with them, and the log-probs of a rollout."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flow.maths.noise import normal
from flow.policy import FlowPolicy
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from learner.update.workers import InProcessWorker, update
from protocol.config.run import RunConfig
from protocol.messages import Adapter, Prompt, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest, digest_of
from tests.support.runs.metrics import untimed

Judge = Callable[[Rollout, np.ndarray], np.ndarray]

PROMPTS = (Prompt(index=0, text="a red circle"), Prompt(index=1, text="two blue squares", negative="photo"))


def scored(values: np.ndarray) -> Scores:
    """What the pool answers for the config's one reward."""
    valid, values = np.isfinite(values), values.astype(np.float32)
    reasons = tuple("" if ok else "blurred" for ok in valid)
    return Scores(values=values, valid=valid, reasons=reasons, components={"brightness": values})


def redness(_: Rollout, images: np.ndarray) -> np.ndarray:
    return images[..., 0].mean((1, 2)) / 255


def draw_groups(
    policy: RolloutPolicy,
    config: RunConfig,
    adapter: Adapter,
    *,
    iteration: int,
    judge: Judge = redness,
    prompts: Sequence[Prompt] = PROMPTS,
) -> list[ScoredGroup]:
    groups = []
    for group in range(config.group.per_iteration):
        prompt, shards = prompts[group % len(prompts)], []
        for first in range(0, config.group.size, config.group.shard):
            request = ShardRequest(
                iteration=iteration,
                group=group,
                prompt=prompt,
                first_member=first,
                members=config.group.shard,
                adapter_version=adapter.version,
                adapter_digest=adapter.digest,
            )
            _, rollout, images = policy.rollout(request)
            shards.append(ScoredShard(rollout=rollout, facts=rollout.facts(), scores=scored(judge(rollout, images))))
        groups.append(ScoredGroup(prompt=prompt, shards=tuple(shards)))
    return groups


def iterate(learner: Learner, policy: RolloutPolicy, config: RunConfig, **how: Any) -> dict[str, float]:
    adapter = learner.adapter()
    assert policy.receive(adapter) == (adapter.version, adapter.digest)
    return learn(config, draw_groups(policy, config, adapter, iteration=learner.iteration, **how), learner)


def learn(config: RunConfig, groups: Sequence[ScoredGroup], *learners: Learner) -> dict[str, float]:
    """One update by these workers, in the order of their seats; what it says, without seconds."""

    async def run() -> dict[str, float]:
        return untimed(await update(config, [InProcessWorker(learner) for learner in learners], complete(groups)))

    return asyncio.run(run())


def complete(groups: Sequence[ScoredGroup]) -> list["asyncio.Future[ScoredGroup]"]:
    """The groups as the loop hands them on once they are made."""
    coming = [asyncio.get_running_loop().create_future() for _ in groups]
    for future, group in zip(coming, groups, strict=True):
        future.set_result(group)
    return coming


def far_from_fresh(adapter: Adapter) -> Adapter:
    """A fresh adapter changes nothing; this one changes every velocity."""
    arrays = {name: held + 0.1 * normal(name, shape=held.shape).numpy() for name, held in adapter.arrays.items()}
    return replace(adapter, arrays=arrays, digest=digest_of(arrays))


def require_exact_ratios(told: dict[str, float], config: RunConfig) -> None:
    """An iteration began with ratios of exactly 1; with one update they are 1 all the way, and nothing is clipped."""
    if config.is_forward:
        assert told["probe/latent_deviation"] == 0.0
        return
    assert told["train/first_ratio_deviation"] == 0.0
    if config.learner.updates_per_iteration == config.learner.epochs == 1:
        assert told["train/ratio_mean"] == 1.0
        assert told["train/clip_fraction"] == told["train/approx_kl"] == 0.0


def alone(k: int, explored: Sequence[int], rows: int) -> int:
    """Each row has a velocity of its own, as if no two had the same state."""
    del k, explored, rows
    return 1


def log_probs_of(policy: FlowPolicy, rollout: Rollout) -> torch.Tensor:
    """Log-probs [N, S] of a rollout under a policy, computed with their gradient as the learner does."""
    prompt = rollout.request.prompt
    conditioning = policy.conditioning(prompt.text, prompt.negative, prompt.conditions)
    device = next(policy.backbone.transformer.parameters()).device
    columns = []
    for k in rollout.steps:
        latents, following = (torch.from_numpy(rollout.latents[:, point].copy()).to(device) for point in (k, k + 1))
        rows_per_state = policy.rows_per_state(k, rollout.steps, len(latents))
        transition, _ = policy.transition(latents, k, conditioning=conditioning, rows_per_state=rows_per_state)
        assert transition.mean.requires_grad
        columns.append(transition.log_prob(following).detach().cpu())
    return torch.stack(columns, dim=1)
