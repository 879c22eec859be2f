"""Lanes: the gradient of an optimizer step as a sum whose order does not depend on the number of learner workers.

Shard s of the step adds its gradient to lane s mod L, in the order of the shards, in float32. The lanes are added in a
binary tree with halving strides: lane i and lane i + L/2, then i and i + L/4, down to 0 and 1. Worker w of W owns the
lanes w, w + W, w + 2W and so on. So each worker's own lanes form the first levels of the tree, and the workers' sums
are the leaves of the last log2(W) levels.

These last levels are added in slices: the adapter's tensors form W slices of about equal size, and each worker adds one
slice, so it receives and adds at most two adapters' worth for any W. Workers of one node do so first, then the nodes
(`exchanges_of`). Seats c, c + F, c + 2F, ... of a node, with F = W / workers of a node, are a branch of the tree, so a
node sends only the sum of its workers. Where nodes have unequal numbers of workers, fewer of a node add first; if only
one can, the object store of a node takes up to twice as much.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
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


@dataclass(frozen=True)
class Exchange:
    """An exchange of slices in groups of `members` workers, whose seats are `stride` apart.

    Seats and slices have numbers below W, and a number has an index in its group. A worker adds the slices of its own
    index, of all workers of its group.
    """

    stride: int
    members: int

    def index(self, number: int) -> int:
        """Return the index of a seat or a slice in its group, from 0 to members - 1."""
        return number // self.stride % self.members

    def group(self, seat: int) -> range:
        """Return the seats of the group of this seat, in the order in which their sums are leaves of the tree."""
        first = seat - self.index(seat) * self.stride
        return range(first, first + self.members * self.stride, self.stride)

    def cut(self, gradient: Gradient, numbers: Mapping[str, int]) -> list[Gradient]:
        """Split a gradient by the indices of its tensors, whose slices have these `numbers`."""
        return [
            {name: array for name, array in gradient.items() if self.index(numbers[name]) == index}
            for index in range(self.members)
        ]


WHOLE = Exchange(stride=1, members=1)
"""Cuts nothing."""


def exchanges_of(workers: int, near: int) -> list[Exchange]:
    """Return the exchanges that add the sums of all workers: among `near` workers of a node, then between nodes."""
    far = workers // near
    return [exchange for exchange in (Exchange(far, near), Exchange(1, far)) if exchange.members > 1]


def slice_numbers(sizes: Mapping[str, int], slices: int) -> dict[str, int]:
    """Number the slices in the order of the tensors; the largest is at most one tensor larger than the mean.

    Args:
        sizes: of all tensors of the adapter, by name.
    """
    total, ends = sum(sizes.values()), accumulate(sizes.values())
    return {name: (end - sizes[name]) * slices // total for name, end in zip(sizes, ends, strict=True)}


class Lanes:
    """The gradients of one worker's lanes. From its first shard on, a lane takes as much memory as the adapter.

    lanes = Lanes(parameters)
    with lanes.adding_to(3):
        loss.backward()
    gradient = lanes.take(range(8))
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def adding_to(self, lane: int) -> Iterator[None]:
        """Let every backward inside the block add to this lane."""
        gradient = self._gradients.setdefault(lane, {})
        for name, parameter in self._parameters.items():
            parameter.grad = gradient.get(name)
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    gradient[name] = parameter.grad
                parameter.grad = None

    def take(self, owned: Sequence[int]) -> Gradient:
        """Add up the owned lanes, ascending, and forget them."""
        total = added([self._gradients.get(lane, {}) for lane in owned], Tensor.add_)  # in place: a lane is an adapter
        self._gradients = {}
        return {name: gradient.cpu().numpy() for name, gradient in total.items()}

    def clear(self) -> None:
        self._gradients = {}


def added(sums: Sequence[Mapping[str, Leaf]], add: Callable[[Leaf, Leaf], Leaf]) -> dict[str, Leaf]:
    """Add lanes, or the sums of workers, ascending: tensor by tensor, so that partial sums stay small."""
    names = dict.fromkeys(name for each in sums for name in each)
    total = {name: tree_sum([each.get(name) for each in sums], add) for name in names}
    return {name: leaf for name, leaf in total.items() if leaf is not None}


def tree_sum(leaves: Sequence[Leaf | None], add: Callable[[Leaf, Leaf], Leaf]) -> Leaf | None:
    """Add leaves in pairs with halving strides; their number is a power of two. A None adds nothing, not zeros."""
    if len(leaves) == 1:
        return leaves[0]
    one, other = tree_sum(leaves[::2], add), tree_sum(leaves[1::2], add)
    return other if one is None else one if other is None else add(one, other)
