"""Precision of a model: the dtype of its frozen weights, and autocast around every forward.

The adapter stays in float32 and is cast inside; states, velocities that leave a backbone, transitions and log-probs are
float32 always. Rollout and learner enter the same autocast, so the ratio between them stays exactly 1.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from protocol.config.model import ModelConfig


def dtype_of(config: ModelConfig) -> torch.dtype:
    """torch's dtype of `model.dtype`."""
    return getattr(torch, config.dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Mixed precision inside; nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
