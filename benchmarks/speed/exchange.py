"""Seconds of an optimizer step's exchange of gradients, on a cluster that is only simulated.

    python -m benchmarks.speed.exchange                             # the adapters of FLUX.1 and SD3.5, 8 to 64 workers
    python -m benchmarks.speed.exchange --mb 717 --workers 64 --near 1    # as if a node did not add its own sums first

The schedule is the real one: `learner.update.workers.gradient_slices` calls simulated workers. A call takes the time of
its bytes: through the network (into and out of each node), into a node's object store, and between a worker and its
GPU. Transfers that share one of these follow each other; a node sends and receives at once. The seconds of adding are
measured here, on arrays of the real size and number, in one thread.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.output import show
from benchmarks.simulated import ARRAYS
from learner.update.lanes import Exchange, added
from learner.update.workers import gradient_slices

ADAPTERS = (717.0, 75.0)
"""MB in float32: of the presets for FLUX.1-dev, and for Stable Diffusion 3.5 Medium."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second."""

    network: float
    """Into a node, and out of it."""
    store: float
    """Into a node's object store, all its processes together."""
    device: float
    """Between a worker and its GPU."""
    object_s: float
    """Seconds of the driver for each object; nothing overlaps them."""


@dataclass
class Pipe:
    """Moves one thing after the other."""

    rate: float
    free: float = 0.0

    def move(self, size: float, begin: float) -> float:
        """Return when it has moved so many bytes, which are there at `begin`."""
        self.free = max(self.free, begin) + size / self.rate
        return self.free


class Node:
    """A node with its object store."""

    def __init__(self, rates: Rates) -> None:
        self.inward, self.outward, self.store = Pipe(rates.network), Pipe(rates.network), Pipe(rates.store)
        self.held = self.peak = 0.0
        """Bytes in the object store."""

    def put(self, size: float, begin: float) -> float:
        """Write an object; return when it is there."""
        self.hold(size)
        return self.store.move(size, begin)

    def hold(self, size: float) -> None:
        """Count bytes that the object store takes, or frees."""
        self.held += size
        self.peak = max(self.peak, self.held)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a gradient in an object store."""

    size: float
    home: Node
    exchange: int
    """Number of the exchange whose calls made it."""
    fetched: set[Node] = field(default_factory=set)

    def fetch(self, to: Node, begin: float) -> float:
        """Return when it is in the store of a node too."""
        if to is self.home or to in self.fetched:
            return begin
        self.fetched.add(to)
        to.hold(self.size)
        return max(self.home.outward.move(self.size, begin), to.inward.move(self.size, begin))

    def free(self) -> None:
        """Leave every store."""
        for node in (self.home, *self.fetched):
            node.hold(-self.size)


class Worker:
    """A simulated `learner.update.workers.Worker`."""

    def __init__(self, node: Node, step: "Step") -> None:
        self._node, self._step = node, step

    async def keep_each(self, count: int, _: Any, *parts: Any, cut: Exchange | None = None) -> Sequence[Part]:
        """Take the time of adding parts, or of bringing a whole sum from the GPU, and of putting the result away."""
        step, rates = self._step, self._step.rates
        if cut is None:
            number, size, ready = 0, step.size, step.size / rates.device
        else:
            number, size = 1 + parts[0].exchange, parts[0].size
            begin = step.begin(number)
            ready = max(part.fetch(self._node, begin) for part in parts)
            ready += adding_s(round(step.size / ARRAYS), round(size / step.size * ARRAYS), len(parts))
        step.objects += count
        step.ends[number] = max(step.ends[number], self._node.put(size, ready))
        made = [Part(size / count, self._node, number) for _ in range(count)]
        step.parts[number] += made
        return made


class Step:
    """One optimizer step of simulated workers, which share a clock."""

    def __init__(self, size: float, *, workers: int, near: int, nodes: int, rates: Rates) -> None:
        """
        Args:
            size: bytes of the adapter.
            workers: W.
            near: see `learner.update.workers.update`.
            nodes: with W / nodes workers each.
            rates: of the cluster.
        """
        self.size, self.rates, self.objects = size, rates, 0
        self.ends: dict[int, float] = defaultdict(float)
        """Seconds at which the calls of each exchange have ended."""
        self.parts: dict[int, list[Part]] = defaultdict(list)
        homes = [Node(rates) for _ in range(nodes)]
        asked: Any = [Worker(homes[seat % nodes], self) for seat in range(workers)]
        slices: Any = asyncio.run(gradient_slices(asked, near))
        begin = self.begin(max(self.ends) + 1)
        arrived = max(part.fetch(node, begin) for node in homes for part in slices)
        self.seconds = arrived + size / rates.device + self.objects * rates.object_s
        self.peak = max(node.peak for node in homes)
        """Bytes of the fullest object store."""

    def begin(self, exchange: int) -> float:
        """Return when an exchange begins; the parts of the exchange before the last have left the stores by then."""
        for part in self.parts.pop(exchange - 2, []):
            part.free()
        return self.ends[exchange - 1]


@cache
def adding_s(array: int, arrays: int, parts: int) -> float:
    """Measure the CPU seconds of adding parts with so many arrays of so many bytes."""
    sums = [{f"{each}": np.ones(array // 4, np.float32) for each in range(max(1, arrays))} for _ in range(parts)]
    began = time.process_time()
    added(sums, np.add)
    return time.process_time() - began


def main(
    mb: Annotated[list[float] | None, typer.Option(help="MB of the adapter; repeat it. 717 and 75.")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Learner workers; repeat it. 8, 16 and 64.")] = None,
    per_node: Annotated[int, typer.Option(help="Workers of a node.")] = 8,
    near: Annotated[int, typer.Option(help="Workers of a node that add first; 0: all of them.")] = 0,
    network: Annotated[float, typer.Option(help="GB/s into a node, and out of it.")] = 2.0,
    store: Annotated[float, typer.Option(help="GB/s into a node's object store.")] = 4.0,
    device: Annotated[float, typer.Option(help="GB/s between a worker and its GPU.")] = 4.0,
    object_ms: Annotated[float, typer.Option(help="Milliseconds of the driver for an object.")] = 0.3,
) -> None:
    """Simulate the exchange of one optimizer step."""
    rates = Rates(network=network * 1e9, store=store * 1e9, device=device * 1e9, object_s=object_ms / 1e3)
    names = ("adapter, MB", "workers", "nodes", "seconds", "objects", "store of a node, adapters")
    rows = []
    for size in mb or ADAPTERS:
        for count in workers or (8, 16, 64):
            nodes = max(1, count // per_node)
            step = Step(size * 1e6, workers=count, near=near or count // nodes, nodes=nodes, rates=rates)
            row = (size, count, nodes, step.seconds, step.objects, step.peak / step.size)
            rows.append({name: f"{value:.4g}" for name, value in zip(names, row, strict=True)})
    show(rows)


if __name__ == "__main__":
    typer.run(main)
