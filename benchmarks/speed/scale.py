"""How the loop scales: the real loop, pools, queues, messages and board over actors with simulated models.

    python -m benchmarks.speed.scale --rollout 64 --rewards 16 --workers 16 --groups 2000
    python -m benchmarks.speed.scale --sweep

Every shard, score and micro-batch takes a stated time with jitter; trajectories, images and adapter have their real
size. A shard has 24 trajectories of 10 steps and 264 images of 64 x 64. The pace is compared with the ideal of the
slowest side. Many simulated actors share one process (`--seats`), so that a small machine can hold them.

`--sweep` changes one side at a time, 1 to 128 rollout actors, 1 to 16 reward actors and 1 to 16 learner workers, and
says from which number on more of them add less than 5 %. On a busy machine the simulated times themselves slip; the
driver's CPU seconds for each group do so less. A third of them are Ray's two calls for each shard. The load average
stands beside every figure. Networks and starts of processes are not simulated.
"""

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import psutil
import ray
import typer

from benchmarks.heap import in_use_mib
from benchmarks.local_ray import local_ray
from benchmarks.output import show
from benchmarks.simulated import SimulatedFleet, Times
from deploy.folder.run_folder import RunFolder, open_run_folder
from deploy.monitor.journal import Listener, RunJournal
from deploy.monitor.observe import Observed
from deploy.presets import load_config
from learner.loop.loop import train
from protocol.config.run import RunConfig
from protocol.messages import Prompt

STORE = 6 * 2**30
"""Bytes of the object store."""
WARM = 3
"""Iterations at the start that do not count: processes start, and the queues fill."""
SWEEPS: Mapping[str, Sequence[int]] = {
    "rollout": (1, 4, 16, 32, 64, 96, 128),
    "rewards": (1, 2, 4, 8, 16),
    "workers": (1, 2, 4, 8, 16),
}
"""The numbers of each side, while the other sides keep their numbers."""
BESIDE = {"rollout": 32, "rewards": 16, "workers": 16}
"""The numbers of the other sides in a sweep."""
ROUNDS = 4
"""Iterations of one measurement of a sweep."""
HELPS = 1.05
"""Pace of more actors over that of fewer from which on they help."""
SHOWN = (
    *("rollout", "rewards", "workers", "slowest", "ideal_per_s", "shards_per_s", "share_of_ideal"),
    *("driver_cpu_ms_per_group", "driver_cores", "driver_growth_mib", "store_growth_mib"),
)
"""Columns of the table."""
PROMPTS = [Prompt(index=index, text=f"prompt {index}") for index in range(64)]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The pools of one measurement."""

    rollout: int
    rewards: int
    workers: int

    def config(self, *, groups: int, lag: int) -> RunConfig:
        """Make the config of a run with these pools and `groups` groups of one shard an iteration."""
        return load_config(
            "toy_geneval",
            overrides=[
                "iterations=1000000",
                "group.size=24",
                "sampling.steps=10",
                "sampling.window.rule=all",
                "completion={rule: ode, substeps: 2, spacing: even, solver: euler}",
                "sampling.shared_noise=false",
                "sampling.splits=[]",
                "credit.rule=gae",
                "credit.normalise=per_step",
                f"group.per_iteration={groups}",
                f"group.max_lag={lag}",
                "learner.probe_every=0",
                "learner.updates_per_iteration=1",
                "checkpoint.every=1000000",
                "evaluation.component=reward",
                "status.trajectories=0",
                f"cluster.rollout_actors={self.rollout}",
                f"cluster.learner.workers={self.workers}",
                "learner.lanes=16",
                f"rewards.geneval.actors={self.rewards}",
                "rewards.geneval.batch=264",
                f"rewards.geneval.queue={264 * 4 * self.rollout}",
            ],
        )

    def ideal(self, times: Times, steps: int) -> dict[str, float]:
        """Return the shards a second that each side could make if it never waited."""
        return {
            "rollout": self.rollout / times.shard_s,
            "reward": self.rewards / times.score_s,
            "learner": self.workers / (times.pair_s * steps),
        }


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was read when an iteration was done."""

    at_s: float
    cpu_s: float
    driver_mib: float
    """Memory of the driver without the object store, which it shares with the actors."""
    in_use_mib: float
    """Blocks of the driver's C library that are not free; if only `driver_mib` grows, free memory is in pieces."""
    blocks: int
    """Blocks that Python's own allocator holds in the driver."""
    hosts_mib: float
    """Memory of the actors without the object store."""
    store_mib: float


class Meter(Listener):
    """Reads clock, CPU time and memory at the end of each iteration and stops the run after the last one."""

    def __init__(self, iterations: int, stop: asyncio.Event) -> None:
        self.moments: list[Moment] = []
        self._process = psutil.Process()
        self._iterations = iterations
        self._stop = stop

    def recorded(self, iteration: int, line: Mapping[str, Any]) -> None:
        """Read."""
        del line
        cpu, memory = self._process.cpu_times(), self._process.memory_info()
        self.moments.append(
            Moment(
                at_s=time.monotonic(),
                cpu_s=cpu.user + cpu.system,
                driver_mib=(memory.rss - memory.shared) / 2**20,
                in_use_mib=in_use_mib(),
                blocks=sys.getallocatedblocks(),
                hosts_mib=_actors_mib(),
                store_mib=_store_mib(),
            )
        )
        if iteration >= self._iterations:
            self._stop.set()


def _actors_mib() -> float:
    """Memory of the actors' processes without the object store that they share."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith("ray::"):
                info = process.memory_info()
                total += info.rss - info.shared
        except psutil.Error:
            continue
    return total / 2**20


def _store_mib() -> float:
    """Bytes of the objects that the object store holds."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return stats.object_store_bytes_used / 2**20


def measure(size: Size, times: Times, *, groups: int, per_iteration: int, seats: int, lag: int) -> dict[str, Any]:
    """Run the loop on the running cluster and compare its pace with the ideal.

    Args:
        size: of the pools.
        times: of the simulated work.
        groups: groups to measure, after `WARM` iterations.
        per_iteration: groups of one iteration, each of one shard.
        seats: simulated actors in one process.
        lag: `group.max_lag`.

    Returns:
        The figures by name.
    """
    config = size.config(groups=per_iteration, lag=lag)
    iterations = WARM + max(2, -(-groups // per_iteration))
    with tempfile.TemporaryDirectory() as temporary:
        run = open_run_folder(Path(temporary) / "run", config)
        try:
            moments = asyncio.run(_run(config, run, times, iterations=iterations, seats=seats))
        finally:
            run.close()
    return _figures(moments[WARM - 1 :], size, times, config)


def _figures(moments: Sequence[Moment], size: Size, times: Times, config: RunConfig) -> dict[str, Any]:
    first, last = moments[0], moments[-1]
    seconds, shards = last.at_s - first.at_s, (len(moments) - 1) * config.group.per_iteration
    ideal = size.ideal(times, config.sampling.steps)
    slowest = min(ideal, key=lambda side: ideal[side])

    def quarters(name: str) -> list[float]:
        """Average the values over each quarter of the measurement."""
        values = [float(getattr(moment, name)) for moment in moments]
        bounds = [round(len(values) * part / 4) for part in range(5)]
        return [round(mean(values[begin:end] or values[-1:]), 1) for begin, end in pairwise(bounds)]

    def growth(name: str) -> float:
        """Compare the mean of the second half with that of the first."""
        first, second, third, fourth = quarters(name)
        return (third + fourth - first - second) / 2

    return {
        **asdict(size),
        "per_iteration": config.group.per_iteration,
        "groups": shards,
        "seconds": round(seconds, 2),
        "shards_per_s": round(shards / seconds, 2),
        "ideal_per_s": round(ideal[slowest], 2),
        "slowest": slowest,
        "share_of_ideal": round(shards / seconds / ideal[slowest], 4),
        "driver_cpu_ms_per_group": round(1000 * (last.cpu_s - first.cpu_s) / shards, 2),
        "driver_cores": round((last.cpu_s - first.cpu_s) / seconds, 3),
        "driver_mib": round(last.driver_mib, 1),
        "driver_growth_mib": round(growth("driver_mib"), 1),
        "driver_mib_by_quarter": quarters("driver_mib"),
        "in_use_mib_by_quarter": quarters("in_use_mib"),
        "blocks_by_quarter": quarters("blocks"),
        "actors_growth_mib": round(growth("hosts_mib"), 1),
        "store_mib": round(last.store_mib, 1),
        "store_growth_mib": round(growth("store_mib"), 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


async def _run(config: RunConfig, run: RunFolder, times: Times, *, iterations: int, seats: int) -> list[Moment]:
    stop = asyncio.Event()
    meter = Meter(iterations, stop)
    journal = RunJournal(run, meter)
    fleet = SimulatedFleet(config, journal, times, seats=seats)
    try:
        async with Observed(run, fleet, journal, stop) as observed:
            await fleet.start()
            gc.freeze()
            observed.reporter.begin(0)
            await train(
                config,
                prompts=PROMPTS,
                heldout=(),
                ports=fleet.ports,
                journal=journal,
                stop=stop,
                between=observed.control.between,
                observer=observed,
                is_evaluated=True,
            )
    finally:
        fleet.stop()
    return meter.moments


def main(
    rollout: Annotated[int, typer.Option(help="Rollout actors.", min=1)] = 64,
    rewards: Annotated[int, typer.Option(help="Reward actors.", min=1)] = 16,
    workers: Annotated[int, typer.Option(help="Learner workers.", min=1)] = 16,
    groups: Annotated[int, typer.Option(help="Groups to measure.", min=1)] = 2000,
    per_iteration: Annotated[int, typer.Option(help="Groups of an iteration; 0 takes four a rollout actor.")] = 0,
    lag: Annotated[int, typer.Option(help="group.max_lag.", min=0)] = 1,
    shard_s: Annotated[float, typer.Option(help="Seconds of a shard.")] = 1.0,
    score_s: Annotated[float, typer.Option(help="Seconds of a call of a reward actor.")] = 0.08,
    pair_s: Annotated[float, typer.Option(help="Seconds of a micro-batch.")] = 0.008,
    jitter: Annotated[float, typer.Option(help="Largest relative deviation of a time.", min=0, max=1)] = 0.2,
    adapter_mb: Annotated[float, typer.Option(help="Size of the adapter in MiB.")] = 1.0,
    seats: Annotated[int, typer.Option(help="Simulated actors in one process.", min=1)] = 32,
    sweep: Annotated[bool, typer.Option(help="Change each side in turn, up to 128 rollout actors.")] = False,
) -> None:
    """Measure how far the loop's pace is from the ideal of its slowest side."""
    times = Times(shard_s=shard_s, score_s=score_s, pair_s=pair_s, jitter=jitter, adapter_mb=adapter_mb)
    sizes = sweep_sizes() if sweep else [("", Size(rollout=rollout, rewards=rewards, workers=workers))]
    rows: list[dict[str, Any]] = []
    measured: dict[Size, dict[str, Any]] = {}
    with local_ray(4, object_store_memory=STORE):
        for side, size in sizes:
            if size not in measured:
                count = per_iteration or 4 * size.rollout
                wanted = ROUNDS * count if sweep else groups
                measured[size] = measure(size, times, groups=wanted, per_iteration=count, seats=seats, lag=lag)
            rows.append({"side": side, **measured[size]})
            typer.echo(json.dumps(rows[-1]), err=True)
    show([{name: row[name] for name in SHOWN} for row in rows])
    for side in SWEEPS if sweep else ():
        typer.echo(f"{side}: more than {enough(rows, side)} add less than {HELPS - 1:.0%}")


def sweep_sizes() -> list[tuple[str, Size]]:
    """List the measurements of a sweep, each with the side that it changes."""
    return [(side, Size(**{**BESIDE, side: number})) for side, numbers in SWEEPS.items() for number in numbers]


def enough(rows: Sequence[Mapping[str, Any]], side: str) -> int:
    """Find where adding actors of a side stops helping.

    Args:
        rows: figures of a sweep.
        side: the side that changes.

    Returns:
        The smallest number that no larger one beats by 5 %.
    """
    own = sorted((row[side], row["shards_per_s"]) for row in rows if row["side"] == side)
    best = max(pace for _, pace in own)
    return next(number for number, pace in own if pace * HELPS >= best)


if __name__ == "__main__":
    typer.run(main)
