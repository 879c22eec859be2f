"""What an adapter costs on its way: from the learner to every rollout actor, and the sums of its gradients before.

    python -m benchmarks.speed.publication                               # 20, 80 and 320 MB; 2, 4 and 8 learner workers
    python -m benchmarks.speed.publication --sizes 20 --workers 2 --json publication.json

Publication: the real `RolloutPool` over actors without a model on several nodes, which are raylets of this machine with
an object store each. Every actor computes the digest of what it received. The bytes are those that the object stores
wrote, so "per node once" is a figure. Reduction: the real `LearnerGroup` over workers without a model, a process each,
whose update has nothing to train. Transfers between real machines take longer by the network's time.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import torch
import typer
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from actors.learners import LearnerGroup
from actors.pool.calls import HEARTBEAT, Alive
from actors.pool.nodes import NodeFailures
from actors.rollouts import ADAPTERS, RolloutPool
from benchmarks.simulated import Seats, Times, arrays_of
from deploy.presets import load_config
from flow.device import library_facts
from learner.update.lanes import Lanes
from protocol.config.run import RunConfig
from protocol.messages import Adapter, Prompt, ScoredGroup, digest_of

SIZES = (20, 80, 320)
WORKERS = (2, 4, 8)
LANES = 8
STORE = 6 * 2**30
"""Bytes of a node's object store."""
OPTIONS: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": {**HEARTBEAT["concurrency_groups"], ADAPTERS: 1}}
"""Options of the actor class below."""


@ray.remote(**OPTIONS)
class Receiver(Alive):
    """A rollout actor without a model."""

    def __init__(self, config: RunConfig) -> None:
        del config

    def prepare(self) -> dict[str, str]:
        """Be ready at once, with the library versions."""
        return library_facts()

    def facts(self) -> dict[str, str]:
        """Return the library versions."""
        return library_facts()

    @ray.method(concurrency_group=ADAPTERS)
    def receive(self, adapter: Adapter) -> tuple[int, str]:
        """Confirm the adapter as `flow.rollout.RolloutPolicy` does."""
        return adapter.version, digest_of(adapter.arrays)


class Quiet:
    """A sink that no failure may reach."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """End the measurement."""
        raise RuntimeError(f"{type} {holds} {reason}: {message}")

    def event(self, message: str, kind: str = "info") -> None:
        """End the measurement."""
        raise RuntimeError(f"{kind}: {message}")


@contextmanager
def cluster(nodes: int) -> Iterator[None]:
    """Start nodes on this machine."""
    machines = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": STORE},
    )
    try:
        for _ in range(nodes - 1):
            machines.add_node(num_cpus=4, object_store_memory=STORE)
        ray.init(address=machines.address, log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        machines.shutdown()


def written_mb() -> list[float]:
    """Return the MB that each node's object store has taken so far, ascending."""
    from ray._private.internal_api import node_stats

    stats = [
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(each.cumulative_created_bytes / 1e6 for each in stats)


def publication(megabytes: float, *, actors: int, nodes: int, rounds: int) -> dict[str, Any]:
    """Publish adapters to rollout actors on the running cluster.

    Args:
        megabytes: size of the adapter.
        actors: rollout actors.
        nodes: of the cluster, for the record.
        rounds: publications; the figures are medians.

    Returns:
        The figures by name.
    """
    config = load_config(
        "toy_geneval", overrides=[f"cluster.rollout_actors={actors}", "cluster.rollout.placement=spread"]
    )
    arrays = arrays_of(megabytes * 1e6)

    async def run() -> list[tuple[float, float, float]]:
        pool = RolloutPool(config, NodeFailures(within_s=60), Quiet(), actor_class=Receiver)
        await pool.pool.start()
        try:
            taken = []
            for version in range(1, rounds + 1):
                began = time.monotonic()
                adapter = Adapter(version=version, arrays=arrays, digest=digest_of(arrays))
                hashed, before = time.monotonic(), sum(written_mb())
                begin_publishing = time.monotonic()
                await pool.publish(adapter)
                end = time.monotonic()
                taken.append((hashed - began, end - begin_publishing, sum(written_mb()) - before))
            return taken
        finally:
            pool.pool.stop()

    digest_s, seconds, written = np.median(asyncio.run(run()), axis=0)
    return {
        "mb": megabytes,
        "actors": actors,
        "nodes": nodes,
        "digest_s": round(digest_s, 3),
        "publish_s": round(seconds, 3),
        "written_mb": round(written, 1),
        "copies_per_node": round(written / megabytes / nodes, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def reduction(sizes: Sequence[float], *, workers: int, rounds: int) -> list[dict[str, Any]]:
    """Add the lane sums of workers and hand the total to each, on the running cluster.

    Args:
        sizes: MB of the adapter, and of each lane sum.
        workers: W.
        rounds: updates of each size; the figures are medians.

    Returns:
        The figures by name, for each size.
    """
    config = load_config(
        "toy_geneval",
        overrides=[f"cluster.learner.workers={workers}", f"learner.lanes={LANES}", "learner.updates_per_iteration=1"],
    )
    seats = Seats(config, Times(shard_s=0, score_s=0, pair_s=0, jitter=0, adapter_mb=0), per_process=1)

    async def run() -> list[dict[str, Any]]:
        group = LearnerGroup(config, NodeFailures(within_s=60), actor_class=seats)
        await group.start()
        try:
            return [await measured(group, size) for size in sizes]
        finally:
            seats.stop()

    async def measured(group: LearnerGroup, size: float) -> dict[str, Any]:
        await asyncio.gather(*(host.resize.remote(size * 1e6) for host in seats.hosts))
        taken = []
        for _ in range(rounds):
            before, began = sum(written_mb()), time.monotonic()
            told = await group.update(_nothing(config))
            taken.append((told["update/reduction_seconds"], time.monotonic() - began, sum(written_mb()) - before))
        reduce_s, update_s, written = np.median(taken, axis=0)
        return {
            "mb": size,
            "workers": workers,
            "reduction_s": round(reduce_s, 3),
            "update_s": round(update_s, 3),
            "written_mb": round(written, 1),
            "expected_mb": round(size * (workers + 1), 1),
            "load_average": round(os.getloadavg()[0], 1),
        }

    return asyncio.run(run())


def _nothing(config: RunConfig) -> list["asyncio.Future[ScoredGroup]"]:
    """Groups without a shard, all complete."""
    groups = [asyncio.get_running_loop().create_future() for _ in range(config.group.per_iteration)]
    for group in groups:
        group.set_result(ScoredGroup(prompt=Prompt(index=0, text=""), shards=()))
    return groups


def own_lanes(megabytes: float, *, lanes: int, rounds: int) -> dict[str, Any]:
    """Add the lanes of one worker, as W = 1 does with all of them.

    Args:
        megabytes: size of the adapter.
        lanes: L.
        rounds: sums; the figure is their median.

    Returns:
        The figures by name.
    """
    parameters = {
        name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in arrays_of(megabytes * 1e6).items()
    }
    held, seconds = Lanes(parameters), []
    for _ in range(rounds):
        for lane in range(lanes):
            with held.adding_to(lane):
                for parameter in parameters.values():
                    parameter.grad = torch.ones_like(parameter)
        began = time.monotonic()
        held.take(range(lanes))
        seconds.append(time.monotonic() - began)
    return {
        "mb": megabytes,
        "lanes": lanes,
        "take_s": round(float(np.median(seconds)), 6),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main(
    sizes: Annotated[list[int] | None, typer.Option(help="MB of the adapter; repeat it. 20, 80, 320.")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Learner workers; repeat it. 2, 4, 8.")] = None,
    actors: Annotated[int, typer.Option(help="Rollout actors.", min=1)] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes of the publication.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Repetitions; the median counts.", min=1)] = 3,
    path: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Measure publication and reduction."""
    torch.set_num_threads(1)
    report: dict[str, Any] = {"cores": os.cpu_count()}
    own = sizes or SIZES
    report["lanes"] = [own_lanes(size, lanes=LANES, rounds=rounds) for size in own]
    _show("lanes", report["lanes"])
    with cluster(nodes):
        report["publication"] = [publication(size, actors=actors, nodes=nodes, rounds=rounds) for size in own]
    _show("publication", report["publication"])
    with cluster(1):
        report["reduction"] = [
            row for count in workers or WORKERS for row in reduction(own, workers=count, rounds=rounds)
        ]
    _show("reduction", report["reduction"])
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
