"""Stepwise-Flow-GRPO's credit, for tests whose worked numbers use each step's plain gain."""

from typing import Any

PLAIN: dict[str, Any] = {
    "rule": "gains",
    "values": "raw",
    "normalise": "joint",
    "scale": "prompt",
    "step_weights": {"rule": "none"},
}
