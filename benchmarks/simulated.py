"""Actors with simulated models: every call takes a stated time with jitter and carries payloads of real size.

Many of them live in one process. A seat stands for one actor: the pools call it like a Ray actor, and the process
behind it serves the calls of one seat one at a time, in order, as a Ray actor does.
"""

import asyncio
import os
import random
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from actors.fleet import RayFleet
from actors.learners import LearnerGroup
from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardPools
from actors.rollouts import RolloutPool
from flow.device import library_facts
from learner.update.lanes import Exchange, Gradient, Seat, added, slice_numbers
from learner.update.update import Findings, Finished
from protocol.config.run import RunConfig
from protocol.messages import (
    Adapter,
    LearnerState,
    Rollout,
    ScoredGroup,
    Scores,
    ShardFacts,
    ShardReceipt,
    ShardRequest,
    digest_of,
)
from protocol.sink import StatusSink

LATENTS = (16, 8, 8)
"""Latents of an image of 64 x 64 of Stable Diffusion 3."""
SIDE = 64
ARRAYS = 384
"""Of a LoRA: 24 blocks with 8 matrices, a pair of factors each."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the simulated work."""

    shard_s: float
    """One shard of a rollout actor."""
    score_s: float
    """One call of a reward actor."""
    pair_s: float
    """One micro-batch of a learner worker: a shard at one step."""
    jitter: float
    """Largest relative deviation of a call's time, to both sides."""
    adapter_mb: float
    """Size of the adapter."""

    def draw(self, seconds: float) -> float:
        """Return the seconds that one call takes."""
        return seconds * (1 + self.jitter * random.uniform(-1, 1))


def arrays_of(size: float) -> dict[str, np.ndarray]:
    """Make float32 arrays of so many bytes together, as many as a LoRA of Stable Diffusion 3.5 has."""
    return {f"lora.{number:03d}": np.ones(int(size) // 4 // ARRAYS, np.float32) for number in range(ARRAYS)}


HOST: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
"""Options of the actor class below."""


@ray.remote(**HOST)
class Host:
    """Serves the calls of many seats."""

    def __init__(self, config: RunConfig, times: Times) -> None:
        self._times = times
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        size, steps = config.group.shard, config.sampling.steps
        self._images = np.zeros((size * (steps + 1), SIDE, SIDE, 3), np.uint8)
        self._latents = np.zeros((size, steps + 1, *LATENTS), np.float32)
        self._gradient = arrays_of(times.adapter_mb * 2**20)
        self._lane_count = config.learner.lanes
        self._lanes: dict[int, Seat] = {}
        self._groups: dict[int, Sequence[ScoredGroup]] = {}
        self._fetched: Counter[int] = Counter()
        self._versions: Counter[int] = Counter()
        self._index = np.arange(size * (steps + 1)).reshape(size, steps + 1)

    async def resize(self, size: float) -> None:
        """Give the adapter another size, in bytes."""
        self._gradient = arrays_of(size)

    async def ping(self, seat: int) -> str:
        """Return the node's id."""
        del seat
        return ray.get_runtime_context().get_node_id()

    async def where(self, seat: int, *_: Any) -> tuple[str, str, int]:
        """Return host name, node id and process id."""
        return socket.gethostname(), await self.ping(seat), os.getpid()

    async def facts(self, seat: int) -> dict[str, str]:
        """Return the library versions, which the driver compares with its own."""
        del seat
        return library_facts()

    async def prepare(self, seat: int) -> dict[str, str]:
        """Be ready at once."""
        return await self.facts(seat)

    async def receive(self, seat: int, adapter: Adapter) -> tuple[int, str]:
        """Confirm an adapter without computing its digest, which every real actor does on a core of its own."""
        del seat
        return adapter.version, adapter.digest

    async def rollout(self, seat: int, request: ShardRequest) -> tuple[ShardReceipt, Rollout, np.ndarray]:
        """Take a shard's time and return arrays of its size."""
        async with self._turns[seat]:
            await asyncio.sleep(self._times.draw(self._times.shard_s))
            size, steps = request.members, self._latents.shape[1] - 1
            rollout = Rollout(
                request=request,
                steps=tuple(range(steps)),
                latents=self._latents,
                log_probs=np.zeros((size, steps), np.float32),
                image_index=self._index,
            )
            facts = ShardFacts(
                request=request,
                steps=rollout.steps,
                image_index=self._index,
                finals=tuple(map(str, range(size))),
            )
            receipt = ShardReceipt(
                adapter_version=request.adapter_version,
                adapter_digest=request.adapter_digest,
                images=len(self._images),
                facts=facts,
            )
            return receipt, rollout, self._images

    async def take_seat(self, seat: int, own: Seat) -> None:
        """Take over the lanes of a seat of the learner group."""
        self._lanes[seat] = own

    async def begin(self, seat: int) -> None:
        """Begin an update."""

    async def feed(self, seat: int, groups: Sequence[ScoredGroup]) -> None:
        """Take the groups of an iteration."""
        self._groups[seat] = groups

    async def train(self, seat: int, first: int, count: int, *, epoch: int) -> None:
        """Fetch the trajectories of the worker's own lanes and take the time of their micro-batches."""
        del epoch
        shards = [shard for group in self._groups[seat][first : first + count] for shard in group.shards]
        own = self._lanes[seat]
        for number, shard in enumerate(shards):
            if own.owns(number % self._lane_count):
                reference: Any = shard.rollout
                rollout: Rollout = await reference
                self._fetched[seat] += rollout.latents.nbytes
                await asyncio.sleep(sum(self._times.draw(self._times.pair_s) for _ in rollout.steps))

    async def lane_sum(self, seat: int, cut: Exchange) -> list[Gradient]:
        """Return a gradient of the adapter's size, cut into slices."""
        sizes = {name: array.size for name, array in self._gradient.items()}
        return cut.cut(self._gradient, slice_numbers(sizes, self._lanes[seat].workers))

    async def added(self, seat: int, *sums: Gradient, cut: Exchange) -> list[Gradient]:
        """Add slices and cut the result."""
        sizes = {name: array.size for name, array in self._gradient.items()}
        return cut.cut(added(sums, np.add), slice_numbers(sizes, self._lanes[seat].workers))

    async def step(self, seat: int, *slices: Gradient, first: int, epoch: int) -> None:
        """Take an optimizer step."""

    async def findings(self, seat: int) -> Findings:
        """Return nothing: the loss of simulated work is not known."""
        del seat
        return Findings(pieces=(), probed={})

    async def call(self, seat: int, method: str, *args: Any, **named: Any) -> Any:
        """Run a method of a learner worker."""
        return await getattr(self, method)(seat, *args, **named)

    async def keep(self, seat: int, method: str, *args: Any, **named: Any) -> tuple[int, Any]:
        """Run a method of a learner worker; return the bytes fetched so far, and the result."""
        return self._fetched[seat], await self.call(seat, method, *args, **named)

    async def keep_each(self, seat: int, method: str, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Do as `keep` does with each result of a method that has several."""
        return self._fetched[seat], *await self.call(seat, method, *args, **named)

    async def finish(self, seat: int, *findings: Findings) -> Finished:
        """End the update."""
        del findings
        self._versions[seat] += 1
        version = self._versions[seat]
        return Finished(metrics={"reward/mean": float(version), "adapter/version": float(version)}, digest=str(version))

    async def adapter(self, seat: int) -> Adapter:
        """Return an adapter of the stated size with its digest."""
        arrays = {name: array + self._versions[seat] for name, array in self._gradient.items()}
        return Adapter(version=self._versions[seat], arrays=arrays, digest=digest_of(arrays))

    async def state(self, seat: int) -> LearnerState:
        """Return the adapter alone."""
        return LearnerState(iteration=self._versions[seat], adapter=await self.adapter(seat), optimizer={})

    async def score(self, seat: int, pieces: Any, *images: np.ndarray) -> Scores:
        """Take a call's time and return a score for each image."""
        async with self._turns[seat]:
            await asyncio.sleep(self._times.draw(self._times.score_s))
            count = sum(len(piece.rows) for piece in pieces)
            assert count <= sum(map(len, images))
            values = np.arange(count, dtype=np.float32)
            return Scores(values=values, valid=np.ones(count, bool), reasons=("",) * count)


RETURNS = {"rollout": 3, "keep": 2}


class Chair:
    """One simulated actor, called like a Ray actor."""

    def __init__(self, host: Any, number: int) -> None:
        self._host, self._number = host, number

    def __getattr__(self, name: str) -> "SeatMethod":
        return SeatMethod(self._host, "where" if name == "__ray_call__" else name, self._number)


@dataclass(frozen=True)
class SeatMethod:
    """A method of a seat."""

    host: Any
    name: str
    seat: int
    returns: int | None = None

    def options(self, *, num_returns: int | None = None, **_: Any) -> "SeatMethod":
        """Take the number of results; ignore the name of the task."""
        return replace(self, returns=num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        """Call it on the process of the seat."""
        method = getattr(self.host, self.name)
        return method.options(num_returns=self.returns or RETURNS.get(self.name, 1)).remote(self.seat, *args, **named)


class Seats:
    """Takes the part of an actor class: `Seats(...).options(...).remote(...)` gives one more seat."""

    def __init__(self, config: RunConfig, times: Times, *, per_process: int) -> None:
        """
        Args:
            config: of the run.
            times: seconds that the simulated work takes.
            per_process: seats of one process.
        """
        host_class: Any = Host
        self._make = lambda: host_class.remote(config, times)
        self._per_process = per_process
        self.hosts: list[Any] = []
        self._seats = 0

    def options(self, **_: Any) -> "Seats":
        """Ignore the resources."""
        return self

    def remote(self, *_: Any) -> Chair:
        """Return a seat, in a new process if the others are full."""
        if self._seats % self._per_process == 0:
            self.hosts.append(self._make())
        seat = Chair(self.hosts[-1], self._seats)
        self._seats += 1
        return seat

    def stop(self) -> None:
        """End the processes."""
        for host in self.hosts:
            ray.kill(host)


class SimulatedFleet(RayFleet):
    """The fleet of a run with the real pools, queues and calls over simulated actors."""

    def __init__(self, config: RunConfig, sink: StatusSink, times: Times, *, seats: int) -> None:
        """
        Args:
            config: of the run.
            sink: takes events.
            times: seconds that the simulated work takes.
            seats: actors of one process.
        """
        nodes = NodeFailures(within_s=config.cluster.restart_window_s)
        self._config = config
        rollouts, rewards, workers = self.seats = [Seats(config, times, per_process=seats) for _ in range(3)]
        self.rollouts = RolloutPool(config, nodes, sink, actor_class=rollouts)
        self.rewards = RewardPools(config, nodes, sink, actor_class=rewards)
        self.learner = LearnerGroup(config, nodes, actor_class=workers)

    def stop(self) -> None:
        """End the processes."""
        for seats in self.seats:
            seats.stop()
