"""Actors with simulated models: every call takes a stated time with jitter and carries payloads of real size.

Many of them live in one process. A seat stands for one actor: the pools call it like a Ray actor, and the process
behind it serves the calls of one seat one at a time, in order, as a Ray actor does.
"""

import asyncio
import os
import random
import socket
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from actors.fleet import RayFleet
from actors.learners import RemoteLearner
from actors.pool.calls import HEARTBEAT, Alive
from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardPools
from actors.rollouts import RolloutPool
from protocol.config.run import RunConfig
from protocol.messages import Adapter, LearnerState, Receipt, Rollout, ScoredGroup, Scores, ShardRequest, digest_of
from protocol.ports import Metrics, Ports
from protocol.sink import StatusSink

LATENTS = (16, 8, 8)
"""Latents of an image of 64 x 64 of Stable Diffusion 3."""
SIDE = 64


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


@ray.remote(num_cpus=0, max_concurrency=1000)
class Host:
    """Serves the calls of many seats."""

    def __init__(self, config: RunConfig, times: Times) -> None:
        self._times = times
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        size, steps = config.group.shard, config.sampling.steps
        self._images = np.zeros((size * (steps + 1), SIDE, SIDE, 3), np.uint8)
        self._latents = np.zeros((size, steps + 1, *LATENTS), np.float32)
        self._index = np.arange(size * (steps + 1)).reshape(size, steps + 1)

    async def ping(self, seat: int) -> str:
        """Return the node's id."""
        del seat
        return ray.get_runtime_context().get_node_id()

    async def where(self, seat: int, *_: Any) -> tuple[str, str, int]:
        """Return host name, node id and process id."""
        return socket.gethostname(), await self.ping(seat), os.getpid()

    async def prepare(self, seat: int) -> None:
        """Be ready at once."""

    async def load(self, seat: int, adapter: Adapter) -> tuple[int, str]:
        """Confirm an adapter without computing its digest, which every real actor does on a core of its own."""
        async with self._turns[seat]:
            return adapter.version, adapter.digest

    async def rollout(self, seat: int, request: ShardRequest) -> tuple[Receipt, Rollout, np.ndarray]:
        """Take a shard's time and return arrays of its size."""
        async with self._turns[seat]:
            await asyncio.sleep(self._times.draw(self._times.shard_s))
            size, steps = request.members, self._latents.shape[1] - 1
            receipt = Receipt(
                adapter_version=request.adapter_version,
                adapter_digest=request.adapter_digest,
                images=len(self._images),
            )
            rollout = Rollout(
                request=request,
                steps=tuple(range(steps)),
                latents=self._latents,
                log_probs=np.zeros((size, steps), np.float32),
                image_index=self._index,
            )
            return receipt, rollout, self._images

    async def score(self, seat: int, pieces: Any, *images: np.ndarray) -> Scores:
        """Take a call's time and return a score for each image."""
        async with self._turns[seat]:
            await asyncio.sleep(self._times.draw(self._times.score_s))
            count = sum(len(piece.rows) for piece in pieces)
            assert count <= sum(map(len, images))
            values = np.arange(count, dtype=np.float32)
            return Scores(values=values, valid=np.ones(count, bool), reasons=("",) * count)


RETURNS = {"rollout": 3}


class Seat:
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

    def remote(self, *args: Any) -> Any:
        """Call it on the process of the seat."""
        method = getattr(self.host, self.name)
        return method.options(num_returns=RETURNS.get(self.name, 1)).remote(self.seat, *args)


class Seats:
    """Takes the part of an actor class: `Seats(...).options(...).remote(...)` gives one more seat."""

    def __init__(self, config: RunConfig, times: Times, *, per_process: int) -> None:
        self._make = lambda: Host.remote(config, times)
        self._per_process = per_process
        self.hosts: list[Any] = []
        self._seats = 0

    def options(self, **_: Any) -> "Seats":
        """Ignore the resources."""
        return self

    def remote(self, *_: Any) -> Seat:
        """Return a seat, in a new process if the others are full."""
        if self._seats % self._per_process == 0:
            self.hosts.append(self._make())
        seat = Seat(self.hosts[-1], self._seats)
        self._seats += 1
        return seat


@ray.remote(num_cpus=0, **HEARTBEAT)
class SimulatedLearner(Alive):
    """Fetches the trajectories as the learner does, and takes the time of its micro-batches."""

    def __init__(self, times: Times, workers: int) -> None:
        self._times, self._workers = times, workers
        self._arrays = {"lora_B": np.ones(int(times.adapter_mb * 2**20) // 4, np.float32)}
        self._version = 0

    @ray.method
    def prepare(self) -> None:
        """Be ready at once."""

    @ray.method
    def update(self, groups: list[ScoredGroup]) -> Metrics:
        """Fetch every trajectory, then take the time of all micro-batches divided by the workers."""
        rollouts = ray.get([shard.rollout for group in groups for shard in group.shards])  # pyright: ignore
        pairs = sum(len(rollout.steps) for rollout in rollouts)
        time.sleep(sum(self._times.draw(self._times.pair_s) for _ in range(pairs)) / self._workers)
        self._version += 1
        self._arrays["lora_B"][0] = self._version
        return {"reward/mean": float(self._version), "adapter/version": float(self._version)}

    @ray.method
    def adapter(self) -> Adapter:
        """Copy the adapter with its digest."""
        return Adapter(version=self._version, arrays=self._arrays, digest=digest_of(self._arrays))

    @ray.method
    def state(self) -> LearnerState:
        """Copy the adapter alone."""
        return LearnerState(iteration=self._version, adapter=self.adapter(), optimizer={})


class LearnerClass:
    """Takes the part of the learner's actor class."""

    def __init__(self, times: Times, workers: int) -> None:
        self._make = lambda: SimulatedLearner.remote(times, workers)

    def options(self, **_: Any) -> "LearnerClass":
        """Ignore the resources."""
        return self

    def remote(self, *_: Any) -> Any:
        """Make the actor."""
        return self._make()


class SimulatedFleet(RayFleet):
    """The fleet of a run with the real pools, queues and calls over simulated actors."""

    def __init__(self, config: RunConfig, sink: StatusSink, times: Times, *, workers: int, seats: int) -> None:
        nodes = NodeFailures(within_s=config.cluster.restart_window_s)
        self._config = config
        self.seats = [Seats(config, times, per_process=seats) for _ in range(2)]
        self.rollouts = RolloutPool(config, nodes, sink, actor_class=self.seats[0])
        self.rewards = RewardPools(config, nodes, sink, actor_class=self.seats[1])
        self.learner = RemoteLearner(config, nodes, actor_class=LearnerClass(times, workers))
        self.ports = Ports(rollouts=self.rollouts, rewards=self.rewards, learner=self.learner, adapters=self.rollouts)

    def stop(self) -> None:
        """End the processes."""
        for host in (host for seats in self.seats for host in seats.hosts):
            ray.kill(host)
        self.learner.stop()
