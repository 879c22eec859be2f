"""Bias and variance of step credit in a forward loss, where the gradient of the expected reward is known.

    python -m benchmarks.fidelity.noise_levels

A forward loss gives every noise level the finished image's advantage. Is a level better served by the step reward of a
step at that level? Images are Gaussian here: 8 coarse elements of std 1 and 56 fine ones of std 0.2, all independent,
so their velocity is known. The trained parameters are a bias b of the velocity for each noise level and element. The
reward is linear. So the expected reward of images of the ODE is linear in b, and its gradient g is exact.

Rollouts have three steps with noise of six, the first ones: as in `stepwise_tree`, where pairs share two of them, or
separate trajectories that earn the exact gains. One group gives an estimate u: the gradient of the mean of A l over
members and levels, with the likelihood l of `elbo`. Rules differ in A only:

    image     the finished image's, at every level
    step      the step's at the level where a step with noise begins, else the image's
    above     the step's at the level where a step with noise ends, else the image's
    weighted  the image's, times the slope of `step` on it at each level: what the image tells of the step rewards

`size` is that of the mean of u, relative to the one of `image`, and `angle` is between the mean of u and g: the bias.
`spread` is the std of u over the size of its mean. `signal` is <E u, g> / (|g| sqrt(E |u|^2)): what an optimizer step
of fixed length from one group's estimate brings; `signal, one bias` is the same for one bias that all levels share. A
rule with twice the signal needs a quarter of the groups.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
import typer
from jaxtyping import Float
from torch import Tensor

from benchmarks.output import show
from flow.maths.schedule import linear_sigmas
from flow.maths.transition import Start, Transition, flow_sde, ode
from learner.credit.rules import calibrated_tree, gains, tree
from learner.credit.tables import lineage
from learner.update.forward import likelihood
from tests.support.worlds.gaussian import gaussian_velocity

COARSE, FINE = 8, 56
SPREADS = torch.cat([torch.ones(COARSE), torch.full((FINE,), 0.2)])
"""Std of each element of an image."""
MEMBERS, STEPS, WINDOW, NOISE_LEVEL = 24, 6, 3, 0.7
STRIDES = {0: 2, 1: 2}
"""How many members share a step of `stepwise_tree`'s rollouts."""
SIGMAS = linear_sigmas(steps=STEPS)
REWARDS: Mapping[str, Float[Tensor, " D"]] = {
    "coarse": torch.eye(COARSE + FINE)[0],
    "fine": torch.eye(COARSE + FINE)[-1],
    "both": torch.eye(COARSE + FINE)[0] + 5 * torch.eye(COARSE + FINE)[-1],
}
"""Weight of each element; in `both` the coarse and the fine one move the reward equally."""
RULES = ("image", "step", "above", "weighted")


def velocity(latents: Float[Tensor, "B D"], sigma: Float[Tensor, " B"]) -> Float[Tensor, "B D"]:
    """The velocity without a bias."""
    return gaussian_velocity(latents=latents, sigma=sigma, mean=0.0, spread=SPREADS)


def transition(latents: Float[Tensor, "B D"], k: int, *, is_noisy: bool) -> Transition:
    """One step of the rollout."""
    sigma, following = (SIGMAS[point].expand(len(latents)) for point in (k, k + 1))
    start = Start(latents, velocity(latents, sigma), sigma, following)
    return flow_sde(start, sigma_first=SIGMAS[1].item(), noise_level=NOISE_LEVEL) if is_noisy else ode(start)


def finished(latents: Float[Tensor, "B D"], k: int) -> Float[Tensor, "B D"]:
    """The image in which the ODE ends from point k."""
    for step in range(k, STEPS):
        latents = transition(latents, step, is_noisy=False).mean
    return latents


def rollout(groups: int, strides: Mapping[int, int]) -> Float[Tensor, "P G N D"]:
    """Draw the images of groups, completed from each point of the window; the last ones are the finished images."""
    width = COARSE + FINE
    latents = torch.randn(groups, 1, width).expand(-1, MEMBERS, -1)
    points = []
    for k in range(WINDOW):
        points.append(finished(latents.reshape(-1, width), k))
        stride = strides.get(k, 1)
        noise = torch.randn(groups, MEMBERS // stride, width).repeat_interleave(stride, 1)
        latents = transition(latents.reshape(-1, width), k, is_noisy=True).sample(noise.reshape(-1, width))
        latents = latents.view(groups, MEMBERS, width)
    points.append(finished(latents.reshape(-1, width), WINDOW))
    return torch.stack(points).view(WINDOW + 1, groups, MEMBERS, width)


def tree_rewards(finals: Float[Tensor, "G N"]) -> Float[Tensor, "G N K"]:
    """The step rewards of `stepwise_tree`, for every member of a branch."""
    own, above = lineage(STRIDES, members=MEMBERS, total=WINDOW)
    branches, parents = (each.expand(len(finals), -1, -1) for each in (own, above))
    explored = torch.ones(len(finals), MEMBERS, WINDOW, dtype=torch.bool)
    earned, _ = calibrated_tree(*tree(finals, explored, branches=branches, parents=parents), finals)
    return earned.gather(1, branches)


def advantages(finals: Float[Tensor, "G N"], earned: Float[Tensor, "G N K"], rule: str) -> Float[Tensor, "L G N"]:
    """Give every noise level its advantage, a difference from the group's mean."""
    image = (finals - finals.mean(-1, keepdim=True)).expand(STEPS, -1, -1)
    if rule == "image":
        return image
    first, levels = int(rule == "above"), image.clone()
    levels[first : first + WINDOW] = (earned - earned.mean(1, keepdim=True)).movedim(-1, 0)
    if rule == "weighted":
        slopes = (levels * image).sum((1, 2)) / image.square().sum((1, 2))
        return image * slopes.view(-1, 1, 1)
    return levels


def estimates(images: Float[Tensor, "G N D"], levels: Float[Tensor, "L G N"]) -> Float[Tensor, "G L D"]:
    """The gradient of the mean of A l in the bias of each level, for each group."""
    groups, members, width = images.shape
    clean = images.reshape(-1, width)
    found = []
    for k, given in enumerate(levels):
        sigma = SIGMAS[k].expand(len(clean))
        noised = (1 - SIGMAS[k]) * clean + SIGMAS[k] * torch.randn(clean.shape)
        bias = torch.zeros(groups, width, requires_grad=True)
        biased = velocity(noised, sigma) + bias.repeat_interleave(members, 0)
        value = likelihood(velocity=biased, noised=noised, clean=clean, sigma=sigma)
        (gradient,) = torch.autograd.grad((given.flatten() * value).sum() / (members * STEPS), bias)
        found.append(gradient)
    return torch.stack(found, 1)


def known_gradient(weights: Float[Tensor, " D"]) -> Float[Tensor, "L D"]:
    """The gradient of the expected reward of the ODE's images in the bias of each level; the same at every b."""
    latents, bias = torch.zeros(1, len(weights)), torch.zeros(STEPS, len(weights), requires_grad=True)
    for k in range(STEPS):
        latents = transition(latents, k, is_noisy=False).mean - (SIGMAS[k] - SIGMAS[k + 1]) * bias[k]
    return torch.autograd.grad((latents * weights).sum(), bias)[0]


def compare(own: Float[Tensor, "G L D"], image: Float[Tensor, "G L D"], known: Float[Tensor, "L D"]) -> dict[str, str]:
    """Return one rule's figures; a signal has its standard error."""
    mean, power = own.mean(0), own.square().sum((1, 2)).mean().sqrt()
    cosine = (mean * known).sum() / known.norm() / mean.norm()
    signals = {"signal": signal(own, known), "signal, one bias": signal(own.sum(1), known.sum(0))}
    return {
        "size": f"{mean.norm() / image.mean(0).norm():.2f}",
        "angle": f"{torch.rad2deg(cosine.arccos()):.0f}",
        "spread": f"{(power.square() - mean.square().sum()).sqrt() / mean.norm():.2f}",
        **{name: f"{each.mean():.3f} ± {each.std() / len(each) ** 0.5:.3f}" for name, each in signals.items()},
    }


def signal(own: Float[Tensor, "G ..."], known: Float[Tensor, "..."]) -> Float[Tensor, " G"]:
    """The part of each estimate along the known gradient, over the root mean square of the estimates' sizes."""
    flat = own.flatten(1)
    return flat @ known.flatten() / known.norm() / flat.square().sum(1).mean().sqrt()


def main(groups: Annotated[int, typer.Option(min=12, help="Groups, each an estimate.")] = 2000) -> None:
    """Draw the groups and print a table for each kind of rollout."""
    torch.manual_seed(0)
    for name, strides in (("stepwise_tree", STRIDES), ("gains", {})):
        points = rollout(groups, strides)
        rows = []
        for reward, weights in REWARDS.items():
            scores = (points @ weights).movedim(0, -1)
            finals = scores[..., -1]
            earned = tree_rewards(finals) if strides else gains(scores.flatten(0, 1)).view(groups, MEMBERS, WINDOW)
            found = {rule: estimates(points[-1], advantages(finals, earned, rule)) for rule in RULES}
            for rule, own in found.items():
                rows.append({"reward": reward, "rule": rule, **compare(own, found["image"], known_gradient(weights))})
        show(rows, title=f"rollouts: {name}")


if __name__ == "__main__":
    typer.run(main)
