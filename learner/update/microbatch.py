"""Cutting minibatches to a size that fits into memory; the gradient is the sum over the pieces."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import torch

from learner.update.minibatch import Minibatch


def micro_batches(minibatches: Iterable[Minibatch], *, most: int | None) -> Iterator[Minibatch]:
    """Every minibatch in pieces of at most `most` samples; None leaves them whole.

    `FlowPolicy.velocity` cuts its forwards at the same places, so that a piece is a batch that the rollout computed.
    """
    for minibatch in minibatches:
        count = len(minibatch.latents)
        size = most or count
        if count <= size:
            yield minibatch
            continue
        for start in range(0, count, size):
            pieces = {
                field.name: value[start : start + size]
                for field in fields(minibatch)
                if isinstance(value := getattr(minibatch, field.name), torch.Tensor) and len(value) == count
            }
            yield replace(minibatch, **pieces)
