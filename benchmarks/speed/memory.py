"""The memory of each role at its highest, predicted and measured: real work on a CPU, a process for each role.

    python -m benchmarks.speed.memory                                       # toy_geneval
    python -m benchmarks.speed.memory toy_geneval group.size=24 method=flow_grpo --vary   # also small batches
    python -m benchmarks.speed.memory toy_geneval --blocks 8 --width 512    # a larger transformer with random weights

A process has the libraries of all roles, and does a small iteration first, so that they load what they load at their
first use. What its resident memory gains from there to its peak is measured: Linux's VmHWM. It is measured twice: as a
run has it, and in use, when the C library returns every block of 32 KiB or more as soon as it is free. The prediction
is that of `train --dry-run`. A rollout actor makes all shards of an iteration and a batch of an evaluation, a reward
actor scores their images, and a learner worker, alone, takes the whole update. Scores for the learner are random
numbers. The driver is not measured.
"""

import asyncio
import ctypes
import gc
import multiprocessing
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer

import actors.learners
import actors.rewards.pool
import actors.rollouts  # noqa: F401  the three of them are what the actors of a run import
from benchmarks.output import show
from deploy.presets import load_config
from deploy.tools.estimate import estimate
from deploy.tools.memory import MIB, RoleMemory, roles_of
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from learner.update.workers import InProcessWorker, update
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.ground.resources import resolve
from protocol.messages import GenerateRequest, Rollout, ScoredGroup, ScoredShard, Scores, ShardRequest
from protocol.prompts import read_prompts
from rewards.scorer import score_prompts, scorer_of

VARIANTS = (
    (),
    ("model.gradient_checkpointing=true",),
    ("model.forward_batch=1",),
    ("model.forward_batch=1", "model.gradient_checkpointing=true"),
)
SMALL = (
    *("group.size=2", "group.shard=2", "group.per_iteration=1"),
    *("learner.updates_per_iteration=1", "evaluation.batch=1"),
)
"""Overrides of the iteration that every process does first."""
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt: from this size on, a block is mapped alone and goes back to the system when it is free."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One role under one config; bytes."""

    variant: str
    role: str
    predicted: int
    in_use: int
    resident: int
    """As a run has it: with the free pieces that the C library keeps."""
    base: int
    """Of the process before."""

    @property
    def ratio(self) -> float:
        """Predicted over what is in use, both above the base."""
        return self.predicted / self.in_use


def measure(config: RunConfig, variant: str) -> Iterator[Cell]:
    """Run each role's work in a process of its own.

    Args:
        config: of a run on CPUs.
        variant: what to call it.

    Yields:
        A cell for each role.

    Raises:
        ConfigError: a role has a GPU.
    """
    if config.reserved["GPU"]:
        raise ConfigError(f"memory is measured on CPUs, got {config.reserved['GPU']:g} GPUs: set cluster.*.gpus=0")
    with TemporaryDirectory() as folder:
        works = {"rollout actor": (roll_out, ()), "learner worker": (learn, ())}
        works |= {f"reward actor {name}": (score, (name,)) for name in config.rewards}
        measured = {
            role: [_apart(work, config, Path(folder), *more, returns_blocks=each) for each in (False, True)]
            for role, (work, more) in works.items()
        }
    for each in roles_of(config, estimate(config, prompts=config.group.per_iteration)):
        if each.role in measured:
            (base, resident), (_, in_use) = measured[each.role]
            yield Cell(
                variant=variant,
                role=each.role,
                predicted=_above(each),
                in_use=in_use,
                resident=resident,
                base=base,
            )


def _above(role: RoleMemory) -> int:
    """Bytes above those of the process itself."""
    return sum(size for part, size in role.host.items() if part != "process")


def _apart(work: Callable[..., None], config: RunConfig, *more: Any, returns_blocks: bool = False) -> tuple[int, int]:
    """Do the work in a forked process; return its memory before and what it gained at the highest."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_child, args=(work, config, more, theirs), kwargs={"returns_blocks": returns_blocks}
    )
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise typer.Exit(1) from None  # the process has said why
    finally:
        process.join()


def _child(
    work: Callable[..., None], config: RunConfig, more: tuple[Any, ...], pipe: Connection, *, returns_blocks: bool
) -> None:
    torch.set_num_threads(config.cluster.learner.threads)
    library = ctypes.CDLL("libc.so.6")
    if returns_blocks:
        library.mallopt(M_MMAP_THRESHOLD, 32 * 1024)
    _warm(config)
    gc.collect()
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak to what is resident now
    base = _resident("VmRSS")
    work(config, *more)
    pipe.send((base, _resident("VmHWM") - base))


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return 1024 * int(found[1])


def _warm(config: RunConfig) -> None:
    """Load the scorers, and do a small iteration, so that the libraries have loaded what they compute with."""
    for reward in config.rewards.values():
        scorer_of(reward)
    small = load_config("toy_geneval", overrides=SMALL)
    with TemporaryDirectory() as folder:
        roll_out(small, Path(folder))
        learn(small, Path(folder))


def roll_out(config: RunConfig, folder: Path) -> None:
    """Do a rollout actor's work; trajectories and images go to files in the folder."""
    policy = RolloutPolicy(config)
    adapter = policy.first_adapter()
    policy.receive(adapter)
    prompts = read_prompts(config.data, config.data.train)
    for group in range(config.group.per_iteration):
        for first in range(0, config.group.size, config.group.shard):
            request = ShardRequest(
                iteration=0,
                group=group,
                prompt=prompts[group],
                first_member=first,
                members=config.group.shard,
                adapter_version=0,
                adapter_digest=adapter.digest,
            )
            _, rollout, images = policy.rollout(request)
            for name, made in (("rollout", rollout), ("images", images)):
                with (folder / f"{group:04}-{first:04}.{name}").open("wb") as file:
                    pickle.dump(made, file)
            del rollout, images, made
    batch = config.evaluation.batch
    policy.generate(
        GenerateRequest(
            prompts=tuple(prompts[number % config.group.per_iteration] for number in range(batch)),
            numbers=tuple(range(batch)),
            seed=0,
            steps=1,
            adapter_version=0,
            adapter_digest=adapter.digest,
        )
    )


def learn(config: RunConfig, folder: Path) -> None:
    """Do the update of a learner worker that is alone, with the files that `roll_out` left."""
    learner = Learner(config, fetch=lambda handles: (_loaded(handle) for handle in handles))
    draws = np.random.default_rng(0)

    def scored(path: Path) -> ScoredShard:
        facts = _loaded(path).facts()
        indices = [each for each in (facts.image_index, facts.further_index) if each is not None]
        count = 1 + max(int(each.max()) for each in indices)
        values = draws.random(count, np.float32)
        scores = Scores(values=values, valid=np.ones(count, bool), reasons=("",) * count)
        handle: Any = path
        return ScoredShard(rollout=handle, facts=facts, scores=scores)

    def grouped(group: int) -> ScoredGroup:
        shards = tuple(scored(path) for path in sorted(folder.glob(f"{group:04}-*.rollout")))
        return ScoredGroup(prompt=shards[0].facts.request.prompt, shards=shards)

    groups = [grouped(group) for group in range(config.group.per_iteration)]

    async def take() -> None:
        coming = [asyncio.get_running_loop().create_future() for _ in groups]
        for future, group in zip(coming, groups, strict=True):
            future.set_result(group)
        await update(config, [InProcessWorker(learner)], coming)

    asyncio.run(take())


def score(config: RunConfig, folder: Path, name: str) -> None:
    """Score the images that `roll_out` left with one scorer, in its batches.

    Args:
        config: of the run.
        folder: holds the images.
        name: the reward's name.
    """
    reward = config.rewards[name]
    scorer = scorer_of(reward)
    for path in sorted(folder.glob("*.images")):
        prompt = _loaded(path.with_suffix(".rollout")).request.prompt
        images = pickle.loads(path.read_bytes())
        for start in range(0, len(images), reward.batch):
            batch = images[start : start + reward.batch]
            score_prompts(scorer, batch, [prompt] * len(batch))


def _loaded(path: Path) -> Rollout:
    with path.open("rb") as file:
        return pickle.load(file)


def write_larger(config: RunConfig, folder: Path, blocks: int, width: int) -> None:
    """Write the config's SD3 pipeline with a transformer of random weights and images of twice the side."""
    from diffusers import SD3Transformer2DModel

    shutil.copytree(resolve(config.model.path), folder)
    settings: Any = SD3Transformer2DModel.load_config(folder / "transformer")
    larger = {
        "num_layers": blocks,
        "num_attention_heads": width // settings["attention_head_dim"],
        "caption_projection_dim": width,
        "sample_size": 2 * settings["sample_size"],
        "pos_embed_max_size": 2 * settings["pos_embed_max_size"],
    }
    made: Any = SD3Transformer2DModel.from_config({**settings, **larger})
    made.save_pretrained(folder / "transformer")


def main(
    preset: Annotated[str, typer.Argument(help="Name or file of the preset.")] = "toy_geneval",
    overrides: Annotated[list[str] | None, typer.Argument(help="Config values, as for `flowcredit train`.")] = None,
    is_varied: Annotated[bool, typer.Option("--vary", help="Also with batches of 1, and with checkpointing.")] = False,
    blocks: Annotated[int, typer.Option(help="Blocks of a larger SD3 transformer; 0 takes the preset's.", min=0)] = 0,
    width: Annotated[int, typer.Option(help="Its width.", min=32)] = 512,
) -> None:
    """Print predicted and measured memory of each role."""
    cells: list[Cell] = []
    with TemporaryDirectory() as folder:
        words = list(overrides or [])
        if blocks:
            model = Path(folder) / "model"
            _apart(write_larger, load_config(preset, overrides=words), model, blocks, width)
            words.append(f"model.path={model}")
        for variant in VARIANTS if is_varied else VARIANTS[:1]:
            config = load_config(preset, overrides=[*words, *variant])
            cells += measure(config, " ".join(variant) or "as it is")
    rows = []
    for cell in cells:
        sizes = {"predicted": cell.predicted, "in use": cell.in_use, "resident": cell.resident, "process": cell.base}
        mib = {name: f"{size / MIB:.1f}" for name, size in sizes.items()}
        rows.append({"config": cell.variant, "role": cell.role, **mib, "predicted / in use": cell.ratio})
    show(rows, title="MiB")


if __name__ == "__main__":
    typer.run(main)
