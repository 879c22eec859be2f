"""Lanes: the gradient of an optimizer step as a sum whose order does not depend on the number of learner workers.

Shard s of the step adds its gradient to lane s mod L, in the order of the shards, in float32. The lanes are added in a
binary tree with halving strides: lane i and lane i + L/2, then i and i + L/4, down to 0 and 1. Worker w of W owns the
lanes w, w + W, w + 2W and so on. So each worker's own lanes form the first levels of the tree, and the workers' sums
are the leaves of the last log2(W) levels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor, nn

Gradient = Mapping[str, np.ndarray]
"""float32 arrays by parameter name. It lacks the parameters without a gradient; it is empty if there is no gradient."""
Leaf = TypeVar("Leaf")


@dataclass(frozen=True)
class Seat:
    """The number of a process among the learner workers."""

    worker: int = 0
    workers: int = 1

    def owns(self, lane: int) -> bool:
        """Return whether this worker adds up the lane."""
        return lane % self.workers == self.worker


class Lanes:
    """The gradients of one worker's lanes. From its first shard on, a lane takes as much memory as the adapter.

    lanes = Lanes(parameters)
    with lanes.adding_to(3):
        loss.backward()
    gradient = lanes.take(range(8))
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._held: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def adding_to(self, lane: int) -> Iterator[None]:
        """Let every backward inside the block add to this lane."""
        held = self._held.setdefault(lane, {})
        for name, parameter in self._parameters.items():
            parameter.grad = held.get(name)
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    held[name] = parameter.grad
                parameter.grad = None

    def take(self, owned: Sequence[int]) -> Gradient:
        """Add up the owned lanes, ascending, and forget them."""
        total = tree_sum([self._held.get(lane, {}) for lane in owned], _add)
        self._held = {}
        return {name: gradient.cpu().numpy() for name, gradient in total.items()}

    def clear(self) -> None:
        self._held = {}


def tree_sum(leaves: Sequence[Leaf], add: Callable[[Leaf, Leaf], Leaf]) -> Leaf:
    """Add leaves in pairs with halving strides; the number of leaves is a power of two."""
    held = list(leaves)
    while len(held) > 1:
        half = len(held) // 2
        held = [add(one, other) for one, other in zip(held[:half], held[half:], strict=True)]
    return held[0]


def added(one: Gradient, other: Gradient) -> Gradient:
    """Add the gradients of two branches; a branch without a gradient adds nothing, not zeros."""
    both = {name: np.add(array, other[name]) for name, array in one.items() if name in other}
    return {**other, **one, **both}


def _add(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, gradient in other.items():
        one[name] = one[name].add_(gradient) if name in one else gradient  # in place: lanes are as large as the adapter
    return one
