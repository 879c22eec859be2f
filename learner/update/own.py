"""An objective of the user's own: the loss of the (trajectory, step) pairs of one step.

def loss(log_ratio, advantages, step):
    return -advantages * log_ratio.exp()

`learner.objective: "./mine.py:loss"` names it. The KL term (`learner.kl`) is added to it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from protocol.config.learning import LearnerConfig
from protocol.errors import ConfigError, ContractError, one_line
from protocol.ground.import_path import call_own, is_path

KEY = "learner.objective"


@dataclass(frozen=True)
class PolicyStep:
    """The step of an objective's pairs, under the policy that is trained."""

    k: int
    """Index of the step; 0 is the noisiest."""
    step_size: float
    """h, the difference of the noise levels."""
    mean: Float[Tensor, "N C H W"]
    """Mean of the latents after the step; carries the gradient."""
    std: Float[Tensor, " N"]
    """Std of the latents after the step."""
    next_latents: Float[Tensor, "N C H W"]
    """The latents after the step, as they were rolled out."""
    config: LearnerConfig
    """The section `learner`, such as `config.clip_range`."""


def own_loss(
    path: str, log_ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"], step: PolicyStep
) -> Float[Tensor, " N"]:
    """Apply the function at an import path.

    Args:
        log_ratio: log-prob of the step under the trained policy minus its log-prob under the policy that rolled it
            out, means over latent elements. It carries the gradient, and is 0 before an iteration's first update.
        advantages: A of each pair; 0 where a pair does not count.

    Raises:
        ContractError: it fails, or does not return a float for each pair.
    """
    loss = call_own(KEY, path, log_ratio, advantages, step)
    if not isinstance(loss, Tensor) or loss.shape != log_ratio.shape or not loss.is_floating_point():
        found = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ContractError(
            f"{KEY} {path} must return a loss for each pair, floats {list(log_ratio.shape)}, got {found}"
        )
    return loss


def require_objective(config: LearnerConfig) -> None:
    """Try an objective of the user's own on a few pairs.

    Raises:
        ConfigError: it cannot be found, fails, is not finite, changes its answer, or mixes pairs.
    """
    path = config.objective
    if not is_path(path):
        return
    generator = torch.Generator().manual_seed(0)
    mean, old_mean, noise = torch.randn(3, 4, 2, 2, 2, generator=generator)
    old_mean, std = mean + 0.01 * old_mean, torch.full((4,), 0.5)
    next_latents, advantages = old_mean + 0.5 * noise, torch.tensor([1.0, -1.0, 0.5, 0.0])

    def tried(rows: slice) -> tuple[Tensor, Tensor]:
        new = mean[rows].clone().requires_grad_()
        errors = ((next_latents[rows] - each).square().flatten(1).mean(1) for each in (old_mean[rows], new))
        old, own = (error / (2 * std[rows].square()) for error in errors)
        step = PolicyStep(k=0, step_size=0.1, mean=new, std=std[rows], next_latents=next_latents[rows], config=config)
        loss = own_loss(path, old - own, advantages[rows], step)
        if not loss.requires_grad:
            raise ContractError(f"{KEY} {path} must return a loss with a gradient, got one without")
        (slope,) = torch.autograd.grad(loss.sum(), new)
        return loss.detach(), slope

    try:
        whole, again = tried(slice(4)), tried(slice(4))
        alone = [torch.cat(parts) for parts in zip(*(tried(slice(row, row + 1)) for row in range(4)), strict=True)]
    except ImportError as error:
        raise ConfigError(f"{KEY} {path} cannot be imported: {one_line(error)}") from error
    except ContractError as error:
        raise ConfigError(one_line(error)) from error
    if not all(each.isfinite().all() for each in whole):
        raise ConfigError(f"{KEY} {path} must return finite losses with finite gradients, got {whole[0].tolist()}")
    if not all(map(torch.equal, whole, again)):
        raise ConfigError(
            f"{KEY} {path} must give the same loss for the same pairs, got different ones: take chance out"
        )
    if not all(map(torch.allclose, whole, alone)):
        raise ConfigError(f"{KEY} {path} must give a pair the same loss alone and among others, got different ones")
