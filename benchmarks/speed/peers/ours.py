"""Our side of the comparison: one shard's rollout and one update with it, as a run does them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from deploy.presets import load_config
from flow.maths.noise import INITIAL, forward_noise, trajectory_noise
from flow.models.contract import Conditioning
from flow.models.load import load_backbone
from flow.policy import FlowPolicy, policy_of
from flow.rollout import RolloutPolicy
from learner.update.lanes import WHOLE
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.messages import Adapter, Prompt, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest, digest_of

STEPS = 10
PROMPT = Prompt(index=0, text="a red circle")


def config_of(batch: int, words: Sequence[str]) -> RunConfig:
    """Return the config of one group that is one shard, one micro-batch a step and one optimizer step."""
    alone = ["group.per_iteration=1", "learner.updates_per_iteration=1", "learner.lanes=1", "learner.probe_every=0"]
    alone += ["cluster.learner.workers=1", "cluster.rollout_actors=1", f"sampling.steps={STEPS}"]
    sizes = [f"{key}={batch}" for key in ("group.size", "group.shard", "model.forward_batch")]
    same = ["learner.average.decay=0", "learner.max_grad_norm=1e6", "model.guidance=1", "iterations=100"]
    return load_config("toy_geneval", overrides=[*words, *alone, *sizes, *same])


@dataclass(frozen=True)
class Update:
    """What an update computed."""

    gradient: Mapping[str, Tensor]
    """Of the mean loss, by the adapter's names."""
    change: Mapping[str, Tensor]
    """Of the adapter."""


class Ours:
    """One prompt's trajectories with an adapter that is not zero, and an update with them."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.policy: FlowPolicy = policy_of(load_backbone(config.model), config)
        self._rollout, self._learner = RolloutPolicy(config), Learner(config)
        fresh = self._learner.state()
        self.adapter, self.old = (_shaken(fresh.adapter, seed) for seed in (1, 2))
        self._state = replace(fresh, adapter=self.adapter, old=self.old if config.is_forward else None)
        self._learner.restore(self._state)
        self._rollout.receive(self.adapter)
        self.trajectories, images = self.rollout()
        shard = ScoredShard(rollout=self.trajectories, facts=self.trajectories.facts(), scores=_scores(len(images)))
        self._groups = [ScoredGroup(prompt=PROMPT, shards=(shard,))]
        self.images = images[self.trajectories.image_index]
        self.advantages = torch.zeros(0)
        self.update()
        self.advantages = torch.from_numpy(np.nan_to_num(self._learner.credit(0).advantages)).float()

    def rollout(self) -> tuple[Rollout, UInt8[np.ndarray, "I H W 3"]]:
        """Roll out the shard; return trajectories and images."""
        request = ShardRequest(
            iteration=0,
            group=0,
            prompt=PROMPT,
            first_member=0,
            members=self.config.group.size,
            adapter_version=self.adapter.version,
            adapter_digest=self.adapter.digest,
        )
        _, rollout, images = self._rollout.rollout(request)
        return rollout, images

    def update(self) -> Update:
        """Take one optimizer step from the first adapter."""
        learner = self._learner
        learner.begin()
        learner.feed(self._groups)
        learner.train(0, 1, epoch=0)
        slices = learner.lane_sum(WHOLE)
        learner.step(*slices, first=0, epoch=0)
        learner.finish(learner.findings())
        after = learner.adapter() if not self.config.is_forward else learner.state().adapter
        change = {name: torch.from_numpy(array - self.adapter.arrays[name]) for name, array in after.arrays.items()}
        return Update(gradient={name: torch.from_numpy(array) for name, array in slices[0].items()}, change=change)

    def rewind(self) -> None:
        """Go back to the state before the update."""
        self._learner.restore(self._state)

    def conditioning(self) -> Conditioning:
        """Return the prompt's embeddings, a row for each member."""
        (row,) = self.policy.conditioning(PROMPT.text, "")
        return row.repeat(self.config.group.size)

    def noise(self, step: int) -> Float[Tensor, "N C H W"]:
        """Return the noise of a step for all members."""
        return trajectory_noise(
            seed=self.config.seed,
            iteration=0,
            group=0,
            members=range(self.config.group.size),
            step=step,
            shape=self.policy.backbone.latent_shape,
        )

    def forward_noises(self) -> list[Float[Tensor, "N C H W"]]:
        """Return the noise of each step at which a forward objective trains the clean latents."""
        members, shape = range(self.config.group.size), self.policy.backbone.latent_shape
        keys = {"seed": self.config.seed, "iteration": 0, "group": 0, "members": members, "epoch": 0, "shape": shape}
        return [forward_noise(step=step, **keys) for step in self.trajectories.steps]

    def initial(self) -> Float[Tensor, "N C H W"]:
        """Return the latents at which all trajectories begin."""
        return self.noise(INITIAL)


def _shaken(adapter: Adapter, seed: int) -> Adapter:
    """Return an adapter with small random numbers, so that no gradient is zero."""
    draws = np.random.default_rng(seed)
    arrays = {
        name: (0.02 * draws.standard_normal(array.shape)).astype(np.float32) for name, array in adapter.arrays.items()
    }
    return Adapter(version=0, arrays=arrays, digest=digest_of(arrays))


def _scores(count: int) -> Scores:
    values = np.random.default_rng(0).random(count, np.float32)
    return Scores(values=values, valid=np.ones(count, bool), reasons=("",) * count)
