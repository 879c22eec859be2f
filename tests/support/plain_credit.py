"""Stepwise-Flow-GRPO's credit, for tests that take a step's reward for what the worked numbers show."""

from typing import Any

PLAIN: dict[str, Any] = {
    "rule": "gains",
    "values": "raw",
    "normalise": "joint",
    "scale": "prompt",
    "step_weights": {"rule": "none"},
}
