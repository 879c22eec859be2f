"""The matrix of the learner group: the same bits for any number of workers, whatever happens to them.

    python -m benchmarks.same_bits workers --out workers.json

A cell is a config of six iterations of the toy world; a way is how it is trained. All ways of a cell must leave the
same sha256 of adapter and optimizer (and running means) in the newest checkpoint. A run here is the real loop, run
folder, supervisor, pools and learner group. Only the processes of the actors are kept from one run to the next, since
their start takes far longer than such a run; a worker that is killed or leaves the group ends as it does elsewhere.

| way                 | what happens                                                                          |
|---------------------|---------------------------------------------------------------------------------------|
| --local             | one process without Ray                                                               |
| 1, 2, 4 workers     | learner groups on Ray                                                                 |
| 1, 4, then 2        | the desired size changes after iterations 1 and 3                                     |
| 2, one killed       | `kill -9` of a worker in the middle of a backward pass of iteration 4                 |
| colocated, 2 bundles  | two rollout actors share bundles with two workers; both offload their weights         |
"""

import asyncio
import hashlib
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from ray.exceptions import RayActorError

from actors.fleet import RayFleet
from actors.learners import LearnerGroup, LearnerWorker
from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardActor, RewardPools
from actors.rollouts import RolloutActor, RolloutPool
from benchmarks.local_ray import local_ray
from benchmarks.output import show, write_json
from deploy.folder.names import CHECKPOINTS
from deploy.folder.run_folder import open_run_folder
from deploy.monitor.journal import Listener, RunJournal
from deploy.presets import load_config, method_names
from deploy.run.inputs import check_inputs
from deploy.run.local import LocalFleet
from deploy.run.supervise import supervise
from learner.loop.loop import Save
from protocol.config.run import RunConfig
from protocol.ports import Fleet
from protocol.sink import StatusSink

SIX = (
    "iterations=6",
    "group.size=4",
    "group.shard=2",
    "group.per_iteration=2",
    "data.tags=[colors]",
    "learner.updates_per_iteration=1",
    "learner.probe_every=2",
    "evaluation.steps=2",
    "evaluation.every=0",
    "evaluation.images_per_prompt=1",
    "checkpoint.every=2",
    "cluster.rollout_actors=1",
    "cluster.heartbeat_s=600",
)
"""Six iterations of four shards: with four workers each trains one of them in an optimizer step."""
ENOUGH = "sampling.steps=6"
"""Steps of the cells of methods, some of which need so many."""
FEW = (
    "sampling.steps=4",
    "sampling.window.rule=all",
    "sampling.splits=[]",
    "completion={rule: ode, substeps: 2, spacing: even, solver: euler}",
    "credit.rule=gae",
    "credit.normalise=per_step",
)
"""Of the other cells: fewer steps, each trained and completed."""
WHOLE = "group.shard=null"
"""Of a method that needs whole groups: two shards an iteration."""
CPUS = 16
"""CPUs that Ray believes it has; the actors take turns."""
WAIT_S = 1800.0
KILLED_AT = 3
"""Iterations done before the one in which a worker dies; the newest checkpoint is one older."""

Between = Callable[[RayFleet, int], Awaitable[None]]
"""Awaited between two iterations, with the number of those done."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a cell is trained."""

    name: str
    keys: tuple[str, ...] = ()
    between: Between | None = None
    sizes: frozenset[int] = frozenset()
    """Sizes that the learner group must have had; empty for one process."""
    failures: int = 0
    """Failures of the learner that the run must have noticed."""


def _of(count: int) -> Way:
    keys = (f"cluster.learner.workers={count}",)
    return Way(name=f"{count} worker{'s' * (count > 1)}", keys=keys, sizes=frozenset({count}))


async def _resize(fleet: RayFleet, done: int) -> None:
    if (size := {1: 4, 3: 2}.get(done)) and fleet.learner.status().desired != size:
        fleet.scale("learner", size)
        async with asyncio.timeout(WAIT_S):
            while fleet.learner.status().ready < size:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _kill(fleet: RayFleet, done: int) -> None:
    if done == KILLED_AT and not fleet.learner.status().restarts:
        await KEPT[LearnerWorker].used[-1].__ray_call__.remote(die_in_backward)


LOCAL = Way(name="--local")
SIZES = tuple(map(_of, (1, 2, 4)))
RESIZED = Way(name="1, 4, then 2 workers", keys=_of(1).keys, between=_resize, sizes=frozenset({1, 4, 2}))
KILLED = Way(name="2 workers, one killed", keys=_of(2).keys, between=_kill, sizes=frozenset({2}), failures=1)
BUNDLES = Way(
    name="colocated, 2 bundles",
    keys=(*_of(2).keys, "cluster.layout=colocated", "cluster.offload=true", "cluster.rollout_actors=2"),
    sizes=frozenset({2}),
)


def die_in_backward(_: object) -> None:
    """Run in a worker: `kill -9` of its process in the middle of its second backward pass from now on."""
    backward, numbers = torch.Tensor.backward, itertools.count(1)

    def deadly(loss: torch.Tensor, *args: Any, **how: Any) -> None:
        if next(numbers) == 2:
            node: Any = loss.grad_fn
            for _ in range(10):
                node = next(each for each, _ in node.next_functions if each is not None)
            node.register_prehook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        backward(loss, *args, **how)

    torch.Tensor.backward = deadly


def cells() -> dict[str, tuple[tuple[str, ...], Sequence[Way]]]:
    """List the cells: config keys and ways by name."""
    every = [LOCAL, *SIZES, RESIZED, KILLED]
    listed: dict[str, tuple[tuple[str, ...], Sequence[Way]]] = {}
    for dtype, lag in itertools.product(("float32", "bfloat16", "float16"), (0, 1)):
        ways = every if lag else [*every, BUNDLES]
        listed[f"{dtype}, max_lag={lag}"] = ((*FEW, f"model.dtype={dtype}", f"group.max_lag={lag}"), ways)
    for method in method_names():
        keys = (f"method={method}", ENOUGH)
        config = load_config("toy_geneval", overrides=keys)
        is_forward = config.is_forward
        if config.learner.objective == "dgpo":
            keys = (*keys, WHOLE)
        listed[method] = (keys, [*every, BUNDLES] if is_forward else [LOCAL, *SIZES])
        if is_forward:
            listed[f"{method}, max_lag=1"] = ((*keys, "group.max_lag=1"), [LOCAL, *SIZES])
    for objective in ("guarded", "masked"):
        listed[f"objective {objective}"] = ((*FEW, f"learner.objective={objective}"), [LOCAL, *SIZES])
    listed["two epochs, a KL term, a running mean"] = (
        (*FEW, "learner.epochs=2", "learner.kl.weight=0.1", "learner.average={decay: 0.9, every: 1}"),
        [LOCAL, *SIZES],
    )
    return listed


class Kept:
    """Takes the part of an actor class: the process of an earlier run serves again."""

    def __init__(self, actor_class: Any) -> None:
        self.used: list[Any] = []
        """Actors of the present run."""
        self._class = actor_class
        self._spare: list[Any] = []

    def options(self, **options: Any) -> "_Order":
        """Note how a new actor would be made."""
        return _Order(self, options)

    def take(self, options: Mapping[str, Any], args: tuple[Any, ...]) -> Any:
        """Return an actor as if it were new."""
        if self._spare:
            actor = self._spare.pop()
            actor.__ray_call__.remote(_begin_again, *args)
        else:
            actor = self._class.options(**options).remote(*args)
        self.used.append(actor)
        return actor

    def keep(self) -> None:
        """Keep the actors that live for the next run."""
        for actor in self.used:
            try:
                ray.get(actor.ping.remote(), timeout=WAIT_S)
            except RayActorError:
                continue
            self._spare.append(actor)
        self.used = []

    def end(self) -> None:
        """End those that wait, to make room."""
        for actor in self._spare:
            ray.kill(actor)
        self._spare = []


@dataclass(frozen=True)
class _Order:
    kept: Kept
    options: Mapping[str, Any]

    def remote(self, *args: Any) -> Any:
        """Return an actor."""
        return self.kept.take(self.options, args)


def _begin_again(actor: Any, *args: Any) -> None:
    actor.__init__(*args)


KEPT = {each: Kept(each) for each in (LearnerWorker, RolloutActor, RewardActor)}


class KeptFleet(RayFleet):
    """A run's fleet over kept processes."""

    def __init__(self, config: RunConfig, sink: StatusSink) -> None:
        nodes = NodeFailures(within_s=config.cluster.restart_window_s)
        self._config = config
        self.rewards = RewardPools(config, nodes, sink, actor_class=KEPT[RewardActor])
        self.rollouts = RolloutPool(config, nodes, sink, actor_class=KEPT[RolloutActor])
        self.learner = LearnerGroup(config, nodes, actor_class=KEPT[LearnerWorker])

    def stop(self) -> None:
        """Keep the processes."""
        for kept in KEPT.values():
            kept.keep()


def _fleet(config: RunConfig, sink: StatusSink, way: Way) -> Fleet:
    if way is LOCAL:
        return LocalFleet(config, sink)
    if config.cluster.is_colocated:
        for kept in KEPT.values():
            kept.end()
        return RayFleet(config, sink)
    return KeptFleet(config, sink)


class Failures(Listener):
    """Counts those of the learner."""

    count = 0

    def event(self, message: str, kind: str) -> None:
        """Count."""
        del message
        self.count += kind == "learner_failed"


def config_of(keys: Sequence[str], way: Way) -> RunConfig:
    """Put the config of a run together from the keys of its cell and of its way."""
    return load_config("toy_geneval", overrides=[*SIX, *keys, *way.keys])


def digests(keys: Sequence[str], way: Way) -> dict[str, str]:
    """Train a cell in one way.

    Args:
        keys: config keys of the cell.
        way: how it is trained.

    Returns:
        sha256 of each file of the newest checkpoint that holds arrays, by its path.

    Raises:
        RuntimeError: what the way is about did not happen.
    """
    config = config_of(keys, way)
    with tempfile.TemporaryDirectory(prefix="same_bits_") as temporary:
        folder = Path(temporary) / "run"
        asyncio.run(_train(config, folder, way))
        newest = max(path for path in (folder / CHECKPOINTS).iterdir() if not path.is_symlink())
        if newest.name != f"iteration_{config.iterations:06d}":
            raise RuntimeError(f"{way.name} must end with its last iteration, got {newest.name}")
        files = sorted(newest.rglob("*.safetensors"))
        return {str(path.relative_to(newest)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def _train(config: RunConfig, folder: Path, way: Way) -> None:
    inputs = check_inputs(config, is_local=way is LOCAL)
    run = open_run_folder(folder, config)
    failures = Failures()
    journal = RunJournal(run, failures)
    fleet = _fleet(config, journal, way)

    async def between(_: Save) -> None:
        if way.between and isinstance(fleet, RayFleet):
            await way.between(fleet, journal.iteration)

    try:
        await fleet.start()
        await supervise(
            config,
            run=run,
            fleet=fleet,
            journal=journal,
            prompts=inputs.prompts,
            heldout=inputs.heldout[:2],
            stop=asyncio.Event(),
            between=between,
            resume_from=None,
        )
        sizes = {int(line["update/workers"]) for line in run.lines() if "update/workers" in line}
    finally:
        fleet.stop()
        run.close()
    if sizes != way.sizes or failures.count != way.failures:
        raise RuntimeError(
            f"{way.name} must have groups of {sorted(way.sizes)} workers and {way.failures} failures, got"
            f" {sorted(sizes)} and {failures.count}"
        )


def workers(
    out: Annotated[Path, typer.Option(help="JSON file that receives the digests; runs that stand there are kept.")],
    only: Annotated[str, typer.Option(help="Only cells whose name contains this text.")] = "",
) -> None:
    """Train every cell in every way; exit code 1 when a way learns other bits than --local."""
    torch.set_num_threads(1)
    columns, rows = [way.name for way in [LOCAL, *SIZES, RESIZED, KILLED, BUNDLES]], []
    found: dict[str, dict[str, dict[str, str]]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    began, differing = time.monotonic(), 0
    with local_ray(CPUS):
        for name, (keys, ways) in cells().items():
            if only not in name:
                continue
            held = found.setdefault(name, {})
            for way in ways:
                if way.name in held:
                    continue
                held[way.name] = digests(keys, way)
                typer.echo(f"{name}, {way.name}: {', '.join(each[:12] for each in held[way.name].values())}", err=True)
                write_json(out, found)
            marks = {each: "equal" if own == held[LOCAL.name] else "OTHER" for each, own in held.items()}
            differing += "OTHER" in marks.values()
            adapter = held[LOCAL.name]["pytorch_lora_weights.safetensors"][:12]
            rows.append({"cell": name, "adapter": adapter, **{each: marks.get(each, "") for each in columns}})
    if rows:
        show(rows)
    runs = sum(map(len, found.values()))
    typer.echo(f"{runs} runs in {len(found)} cells in {time.monotonic() - began:.0f} s, {differing} with other bits")
    raise typer.Exit(1 if differing else 0)
