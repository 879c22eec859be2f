"""The gradients that a learner computes, before it clips them."""

import pytest
import torch

from learner.update import learner


def watch_gradients(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A list that receives the whole gradient of every optimizer step, flat, as it is before clipping."""
    seen: list[torch.Tensor] = []
    clip = learner.clip_grad_norm_

    def watched(parameters, most: float) -> torch.Tensor:
        held = list(parameters)
        seen.append(torch.cat([parameter.grad.flatten().clone() for parameter in held if parameter.grad is not None]))
        return clip(held, most)

    monkeypatch.setattr(learner, "clip_grad_norm_", watched)
    return seen


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """|one - other| / |one|, which a wrong scale or a missing part shows as such."""
    return ((one - other).norm() / one.norm()).item()
