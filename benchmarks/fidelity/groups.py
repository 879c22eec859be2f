"""A group of trajectories whose points can be completed and scored in any way, for benchmarks of single steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from deploy.presets import load_config
from flow.maths.completion import complete, substep_grid
from flow.maths.noise import INITIAL, SHARED, trajectory_noise
from flow.models.contract import Conditioning
from flow.models.load import load_backbone
from flow.policy import FlowPolicy, policy_of
from flow.rollout import Step, trajectory
from protocol.config.run import RunConfig
from protocol.config.sampling import CompletionConfig
from protocol.messages import Prompt
from protocol.prompts import read_prompts
from rewards.scorer import CheckedScorer, build_scorer


@dataclass(frozen=True)
class World:
    """A preset's base model with its scorers and redness."""

    config: RunConfig
    policy: FlowPolicy
    scorers: dict[str, CheckedScorer]

    @classmethod
    def of(cls, preset: str, overrides: Sequence[str]) -> "World":
        """Load it."""
        config = load_config(preset, overrides=overrides)
        torch.set_num_threads(config.cluster.rollout.threads)
        scorers = {name: build_scorer(reward.scorer, **reward.args) for name, reward in config.rewards.items()}
        scorers["redness"] = build_scorer("benchmarks.scorers:Redness")
        return cls(config, policy_of(load_backbone(config.model), config), scorers)

    def prompts(self, count: int) -> list[Prompt]:
        """Return so many training prompts of all kinds."""
        return read_prompts(self.config.data, self.config.data.train)[:: max(1, 240 // count)][:count]


@dataclass(frozen=True)
class Group:
    """Trajectories of one prompt, all members in one batch."""

    policy: FlowPolicy
    prompt: Prompt
    conditioning: tuple[Conditioning, ...]
    points: tuple[Step, ...]
    """The stochastic steps; the latents of each are those at its first point."""
    final: Float[Tensor, "N C H W"]

    def completed(self, point: Step, way: CompletionConfig) -> tuple[Float[Tensor, "N C H W"], int]:
        """Complete `point` for every member; return the clean latents and the number of velocity evaluations."""
        calls = 0

        def velocity(latents: Float[Tensor, "N C H W"], sigma: Float[Tensor, " N"]) -> Float[Tensor, "N C H W"]:
            nonlocal calls
            calls += 1
            return self.policy.velocity(latents, sigma, self.conditioning)

        clean = complete(
            latents=point.latents,
            first_velocity=point.velocity,
            grid=substep_grid(way, sigmas=self.policy.sigmas, k=point.k).expand(len(point.latents), -1),
            velocity=velocity,
            solver=way.solver,
        )
        return clean, calls

    def scores(
        self, latents: Float[Tensor, "N C H W"], scorers: Mapping[str, CheckedScorer]
    ) -> dict[str, Float[np.ndarray, " N"]]:
        """Decode clean latents and return every scorer's scores of the images."""
        images = self.policy.backbone.decode(latents)
        texts, facts = [self.prompt.text] * len(images), [self.prompt.metadata] * len(images)
        return {name: scorer.score(images, texts, facts).values for name, scorer in scorers.items()}


@torch.no_grad()
def draw_group(policy: FlowPolicy, config: RunConfig, *, number: int, prompt: Prompt, members: int) -> Group:
    """Generate the trajectories of one group of the first iteration, as a run of this config would.

    Args:
        policy: the policy.
        config: the run's config.
        number: index of the group in the iteration.
        prompt: the group's prompt.
        members: size of the group.

    Returns:
        The group.
    """
    conditioning = policy.conditioning(prompt.text, prompt.negative, prompt.conditions)
    key = {"seed": config.seed, "iteration": 0, "group": number, "shape": policy.backbone.latent_shape}
    own = list(range(members))
    steps = list(
        trajectory(
            policy,
            initial=trajectory_noise(
                **key, members=[SHARED] * members if config.sampling.shared_noise else own, step=INITIAL
            ),
            conditioning=conditioning,
            noise=lambda k: trajectory_noise(**key, members=own, step=k),
            stochastic=policy.steps,
        )
    )
    points = tuple(step for step in steps if step.k in policy.steps)
    return Group(policy, prompt, conditioning, points, steps[-1].next_latents)
