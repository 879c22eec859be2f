"""The sampler against a loop as released generators have it: one image at a time, and nothing reused.

    python -m benchmarks.speed.released toy_geneval group.size=24 method=tp_grpo sampling.steps=10

The loop follows the description of TurningPoint-GRPO's generator (arXiv 2602.06422): for every trajectory alone, each
stochastic step, and before it the ODE from its point along the rest of the schedule to an image, which is decoded
alone. The sampler makes the same images: it goes through all members at once, completes all points in one batch, and
takes the first velocity of a completion from the main pass. Seconds are CPU seconds of this process, the least of
several rounds of one shard.
"""

import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import typer
from jaxtyping import UInt8
from rich.console import Console

from deploy.presets import load_config
from flow.device import torch_threads
from flow.maths.noise import INITIAL, SHARED, trajectory_noise
from flow.maths.transition import Start, ode
from flow.models.load import load_backbone
from flow.policy import FlowPolicy, policy_of
from flow.rollout import rollout_shard
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.messages import Prompt, ShardRequest
from protocol.prompts import read_prompts

ROUNDS = 3


@torch.inference_mode()
def one_at_a_time(policy: FlowPolicy, request: ShardRequest, config: RunConfig) -> UInt8[np.ndarray, "N P H W 3"]:
    """Generate a shard's trajectories one by one, with an image of every point.

    Args:
        policy: the policy.
        request: the shard; its noise is that of the sampler.
        config: of the run; its completions follow the rest of the schedule by Euler's steps.

    Returns:
        The images of each member's points, the finished one last.
    """
    conditioning = policy.conditioning(request.prompt.text, request.prompt.negative)
    key = {"seed": config.seed, "iteration": request.iteration, "group": request.group}
    shape = policy.backbone.latent_shape
    members = []
    for member in range(request.first_member, request.first_member + request.members):
        first = SHARED if config.sampling.shared_noise else member
        state = trajectory_noise(**key, members=[first], step=INITIAL, shape=shape)
        images = []
        for k in range(policy.total_steps):
            if k in policy.steps:
                clean = state
                for at in range(k, policy.total_steps):
                    sigma, following = policy.sigmas[at : at + 1], policy.sigmas[at + 1 : at + 2]
                    velocity = policy.velocity(clean, sigma, conditioning)
                    clean = ode(Start(clean, velocity, sigma, following)).mean
                images.append(policy.backbone.decode(clean))
            transition, _ = policy.transition(state, k, conditioning=conditioning, as_ode=k not in policy.steps)
            noise = trajectory_noise(**key, members=[member], step=k, shape=shape)
            state = transition.sample(noise) if k in policy.steps else transition.mean
        members.append(np.concatenate([*images, policy.backbone.decode(state)]))
    return np.stack(members)


def at_once(policy: FlowPolicy, request: ShardRequest, config: RunConfig) -> UInt8[np.ndarray, "N P H W 3"]:
    """Make the same images with the sampler.

    Args:
        policy: the policy.
        request: a group's first shard.
        config: of the run.

    Returns:
        The images of each member's points, the finished one last.
    """
    rollout, images = rollout_shard(policy, request, config)
    return images[rollout.image_index]


def least_cpu_seconds(work: Callable[[], object]) -> float:
    """Return the least CPU seconds of several calls."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        rounds.append(time.process_time() - began)
    return min(rounds)


def main(
    preset: Annotated[str, typer.Argument(help="Preset whose model and sampling are used.")] = "toy_geneval",
    overrides: Annotated[list[str] | None, typer.Argument(help="Config values, as for `flowcredit train`.")] = None,
) -> None:
    """Measure both and print their ratio."""
    same = ["completion.rule=schedule", "completion.solver=euler"]
    config = load_config(preset, overrides=[*(overrides or []), *same])
    if config.sampling.window.rule != "all" or config.sampling.merge_std or config.sampling.splits:
        raise ConfigError("this benchmark needs every step of its own, got a window, merged steps or splits: drop them")
    request = request_of(read_prompts(config.data, config.data.train)[0], config.group.shard)
    policy = policy_of(load_backbone(config.model), config)
    with torch_threads(config.cluster.rollout.threads):
        apart = np.abs(at_once(policy, request, config).astype(int) - one_at_a_time(policy, request, config)).max()
        whole, single = (
            least_cpu_seconds(lambda how=how: how(policy, request, config)) for how in (at_once, one_at_a_time)
        )
    Console().print(
        f"{request.members} trajectories of {policy.total_steps} steps: the sampler {whole:.3g} CPU s,"
        f" one image at a time {single:.3g} s, ratio {whole / single:.3f}; the images differ by at most {apart} of 255"
    )


def request_of(prompt: Prompt, members: int) -> ShardRequest:
    """Return the request of a group's first shard."""
    return ShardRequest(
        iteration=0, group=0, prompt=prompt, first_member=0, members=members, adapter_version=0, adapter_digest=""
    )


if __name__ == "__main__":
    typer.run(main)
