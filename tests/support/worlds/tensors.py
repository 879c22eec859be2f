"""How far tensors differ, random tensors of layers by name, and formulas of layers as float64 products, for oracles."""

from typing import Any

import torch


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def add_linear(state: dict[str, Any], name: str, outputs: int, inputs: int, *, has_bias: bool = True) -> None:
    """Put a linear layer's random weight, and bias, into `state`."""
    state[f"{name}.weight"] = torch.randn(outputs, inputs) * inputs**-0.5
    if has_bias:
        state[f"{name}.bias"] = torch.randn(outputs)


def add_norm(state: dict[str, Any], name: str, width: int, *, has_bias: bool = True) -> None:
    """Put a norm's random weight, and bias, into `state`."""
    state[f"{name}.weight"] = 1 + 0.3 * torch.randn(width)
    if has_bias:
        state[f"{name}.bias"] = 0.3 * torch.randn(width)


class Layers:
    """Formulas of layers on rows [N, width], in float64, with tensors by name."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = {name: tensor.double() for name, tensor in state.items()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state.get(f"{name}.bias", 0)

    def norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        """Layer norm."""
        return self.rms_norm(name, x - x.mean(-1, keepdim=True), eps) + self.state[f"{name}.bias"]

    def rms_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.state[f"{name}.weight"]

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2


def heads_of(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Cut rows into heads of one width."""
    return list(x.split(width, 1))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False) -> torch.Tensor:
    """Attention of one head, rows [N, width] and [M, width]."""
    scores = query @ key.T / query.shape[1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1) @ value
