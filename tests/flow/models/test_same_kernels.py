"""A forward with a gradient takes the kernels of one without: so learner and rollout round alike on every device.

torch multiplies a slice in another order if the matrix needs a gradient. On a CPU both orders may round alike, so this
compares the operations.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flow.policy import FlowPolicy, build_policy
from protocol.config.run import RunConfig
from tests.support.worlds.architectures import ARCHITECTURES, model_of

Operation = tuple[str, list[tuple[int, ...]]]
"""Its name, in place or not, and the shapes of what it reads."""
KERNELS = ("mm", "attention", "norm", "convolution", "linear")


class Operations(TorchDispatchMode):
    """Notes every product, attention, norm and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).replace("_.", ".")
        if any(kernel in name for kernel in KERNELS):
            shapes = [tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self.found.append((name, shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_learner_and_rollout_take_the_same_kernels(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, name: str
) -> None:
    policy, _ = build_policy(tiny_config(model=model_of(name, "bfloat16", tmp_path)), device="cpu")
    rollout = operations(policy, has_gradient=False)
    assert operations(policy, has_gradient=True) == rollout
    if name == "sd35":
        policy.backbone.transformer.requires_grad_(requires_grad=True)
        assert operations(policy, has_gradient=False) != rollout, "a frozen matrix that needs a gradient shows"


def operations(policy: FlowPolicy, *, has_gradient: bool) -> list[Operation]:
    """What one evaluation computes."""
    latents, sigma = torch.ones(2, *policy.backbone.latent_shape), torch.tensor([0.3, 0.8])
    conditioning = policy.conditioning("a cat", "")
    with torch.set_grad_enabled(has_gradient), Operations() as mode:
        assert policy.velocity(latents, sigma, conditioning).requires_grad == has_gradient
    return mode.found
