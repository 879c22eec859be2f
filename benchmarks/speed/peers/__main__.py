"""Our speed beside the released code of others, on one model, in one process with one thread.

    python -m benchmarks.speed.peers --flow-grpo ../flow_grpo --turning-point ../TurningPoint-GRPO \
        --flow-factory ../Flow-Factory --nft ../DiffusionNFT
    python -m benchmarks.speed.peers --flow-grpo ../flow_grpo --blocks 8 --width 512     # a model of 32 M parameters

Each path is a checkout that you have; its code is run, nothing of it is here. First both sides do the same work: from
the same weights, embeddings and noise, the latents and log-probs of a rollout, the gradient of an update and the change
of the adapter must agree to rounding. Then they are measured in turns, a rollout and an update each, in CPU seconds, at
the batch of the peer's release and at larger ones. A ratio is that of two neighbouring measurements.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.speed.memory import write_larger
from benchmarks.speed.peers.ours import Ours, config_of
from benchmarks.speed.peers.released import FlowFactory, FlowGrpo, Nft, Released, TurningPoint
from deploy.presets import load_config
from protocol.errors import ConfigError

BATCHES = (24, 48)
BOUNDS = {"latents": 1e-4, "log-probs": 1e-4, "images, of 255": 1.0, "gradient": 1e-4, "change": 1e-2}
"""Largest differences; of a first step of Adam the parts whose gradient is near rounding differ more."""


def proof(theirs: Released) -> dict[str, float]:
    """Let both sides do the same work.

    Returns:
        The differences, relative to the norm of ours except for images.

    Raises:
        ConfigError: one is larger than its bound.
    """
    differences = dict(theirs.rolled_out())
    if theirs.trains:
        theirs.ours.rewind()
        mine, other = theirs.ours.update(), theirs.update()
        differences |= {
            "gradient": _apart(other.gradient, mine.gradient),
            "change": _apart(other.change, mine.change),
        }
    for name, value in differences.items():
        if not value <= BOUNDS[name]:
            raise ConfigError(
                f"{theirs.name} must do the same work as we, got {name} that differ by {value:.2g}, at most"
                f" {BOUNDS[name]:g}: take the commit of docs/performance.md"
            )
    return differences


def measured(theirs: Released, *, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measure a rollout and an update of both sides, per image."""
    works: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "rollout": (theirs.ours.rollout, theirs.rollout)
    }
    if theirs.trains:
        works["update"] = (theirs.ours.update, theirs.train)
    found, count = {}, theirs.ours.config.group.size
    for name, (mine, other) in works.items():
        found[name] = []
        for _ in range(1 + rounds):
            theirs.ours.rewind()
            found[name].append((_cpu_seconds(mine) / count, _cpu_seconds(other) / count))
        found[name].pop(0)  # the first calls allocate
    return found


def commit_of(root: Path) -> str:
    """Return the first letters of a checkout's commit, or nothing if git does not know it."""
    asked = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def compare(kind: type[Released], root: Path, *, batches: Sequence[int], words: Sequence[str], rounds: int) -> None:
    """Prove the same work of a peer, measure it, and print both."""
    console, shown = Console(width=140), f"{kind.name} {commit_of(root)}"
    rows: dict[int, Mapping[str, list[tuple[float, float]]]] = {}
    for batch in sorted({kind.shipped, *batches}):
        theirs = kind(root, Ours(config_of(batch, [*kind.words, *words])))
        if not rows:
            told = ", ".join(f"{name} {value:.1e}" for name, value in proof(theirs).items())
            console.print(f"{shown}, the same work; differences: {told}")
        rows[batch] = measured(theirs, rounds=rounds)
    table = Table("images at a time", "work", "ours, ms an image", "theirs", "ours / theirs", "pairs", box=MARKDOWN)
    for batch, works in rows.items():
        for name, pairs in works.items():
            table.add_row(f"{batch}", name, *_cells(pairs))
    best = {
        name: [min(rows, key=lambda at, of=of: median(p[of] for p in rows[at][name])) for of in (0, 1)]
        for name in rows[max(rows)]
    }
    console.print(table)
    for name, (mine, other) in best.items():
        one, two = (median(pair[of] for pair in rows[at][name]) for of, at in enumerate((mine, other)))
        console.print(f"{name}, each at its best batch ({mine} and {other}): {one / two:.2f}")


def _cells(pairs: Sequence[tuple[float, float]]) -> list[str]:
    ratios = sorted(one / two for one, two in pairs)
    seconds = [f"{1000 * median(pair[of] for pair in pairs):.1f}" for of in (0, 1)]
    return [*seconds, f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", f"{len(pairs)}"]


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    mine, theirs = (torch.cat([each[name].flatten() for name in sorted(other)]) for each in (other, one))
    return ((theirs - mine).norm() / mine.norm()).item()


def main(
    words: Annotated[list[str] | None, typer.Argument(help="Config values, as for `flowcredit train`.")] = None,
    flow_grpo: Annotated[Path | None, typer.Option(help="Checkout of yifan123/flow_grpo.")] = None,
    turning_point: Annotated[Path | None, typer.Option(help="Checkout of YunzeTong/TurningPoint-GRPO.")] = None,
    flow_factory: Annotated[Path | None, typer.Option(help="Checkout of X-GenGroup/Flow-Factory.")] = None,
    nft: Annotated[Path | None, typer.Option(help="Checkout of NVlabs/DiffusionNFT.")] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Images at a time; repeat it. 24, 48.")] = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each side.", min=1)] = 5,
    blocks: Annotated[int, typer.Option(help="Blocks of a larger model with random weights.", min=0)] = 0,
    width: Annotated[int, typer.Option(help="Its width.", min=32)] = 512,
) -> None:
    """Compare with each checkout."""
    torch.set_num_threads(1)
    given = {FlowGrpo: flow_grpo, TurningPoint: turning_point, FlowFactory: flow_factory, Nft: nft}
    if not any(given.values()):
        raise typer.BadParameter("name the checkout of at least one peer, such as --flow-grpo PATH")
    overrides = list(words or [])
    with ExitStack() as stack:
        if blocks:
            model = Path(stack.enter_context(TemporaryDirectory())) / "model"
            write_larger(load_config("toy_geneval", overrides=overrides), model, blocks, width)
            overrides.append(f"model.path={model}")
        for kind, root in given.items():
            if root:
                compare(kind, root.resolve(), batches=batches or BATCHES, words=overrides, rounds=rounds)


if __name__ == "__main__":
    typer.run(main)
