"""Digests of what short runs learn: a refactoring changes no bit of any result, and neither does the learner group.

    python -m benchmarks.same_bits list --out before.json       # at the old commit
    python -m benchmarks.same_bits list --out after.json        # at the new commit, on the same machine
    python -m benchmarks.same_bits compare before.json after.json
    python -m benchmarks.same_bits workers --out workers.json   # the same bits for any number of workers

Every run is a process of its own that trains the toy world with `flowcredit train`. The digests are the sha256 of the
adapter's and the optimizer's file in the newest checkpoint. They are only comparable on equal machines with equal
library versions.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer

from deploy.api.source import open_source
from deploy.folder.read import lines_of
from protocol.status import RunStatus, run_id_of

FILES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors")
METHODS = (
    "awm",
    "dance_grpo",
    "dense_grpo",
    "diffusion_nft",
    "flow_grpo",
    "flow_grpo_fast",
    "mix_grpo",
    "step_weights",
    "stepwise",
    "stepwise_calibrated",
    "stepwise_flow_sde",
    "temp_flow",
    "tp_grpo",
    "tp_grpo_plain",
)
SHORT_EVALUATION = ("evaluation.images_per_prompt=1",)
"""Evaluations do not change what is learned; these overrides keep them short."""
TIMEOUT_S = 1800.0

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def runs() -> dict[str, list[list[str]]]:
    """Arguments of `flowcredit train` by run name; a run with several lists is resumed by each further one."""
    three = [["toy_geneval", "iterations=3"]]
    listed = {
        "toy_geneval": [[*three[0], "--local"]],
        "toy_geneval on Ray": [[*three[0], "cluster.rollout_actors=2"]],
        "toy_geneval resumed": [["toy_geneval", "iterations=1", "--local"], [*three[0], "--local"]],
        "toy_geneval max_lag=1": [[*three[0], "group.max_lag=1", "group.per_iteration=4", "--local"]],
        "toy_ocr": [["toy_ocr", "iterations=2", "--local"]],
        "toy_mix": [["toy_mix", "iterations=2", "--local"]],
    }
    for method in METHODS:
        short = ["toy_geneval", f"method={method}", "iterations=2", "group.per_iteration=4", "--local"]
        listed[f"method={method}"] = [short]
    return listed


@app.command("list")
def list_digests(
    out: Annotated[Path, typer.Option(help="JSON file that receives the digests.")],
    only: Annotated[str, typer.Option(help="Only runs whose name contains this text.")] = "",
) -> None:
    """Train every run of the list and write its digests."""
    digests: dict[str, dict[str, str]] = {}
    for name, arguments in runs().items():
        if only in name:
            digests[name] = dict(_digests(arguments))
            typer.echo(f"{name}: {', '.join(digest[:12] for digest in digests[name].values())}")
            out.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two lists; exit code 1 when a run is missing or a digest differs."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    differing = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    typer.echo(f"{len(old.keys() & new.keys())} runs compared, {len(differing)} differ")
    for name in differing:
        typer.echo(f"  {name}: {old.get(name)} and {new.get(name)}")
    raise typer.Exit(1 if differing else 0)


SIX = (
    "toy_geneval",
    "iterations=6",
    "group.size=8",
    "group.shard=4",
    "group.per_iteration=4",
    "data.tags=[colors]",
    "evaluation.steps=2",
    "evaluation.every=0",
    "status.trajectories=0",
    "cluster.learner.threads=1",
    "cluster.heartbeat_s=30",
    *SHORT_EVALUATION,
)
"""Six iterations of eight shards, four of them in each optimizer step."""
DTYPES = ("float32", "bfloat16", "float16")
TRAINS = "ray::LearnerActor.train"
"""Name of the process of a learner worker while it computes gradients."""


@app.command()
def workers(
    out: Annotated[Path, typer.Option(help="JSON file that receives the digests.")],
    only: Annotated[str, typer.Option(help="Only cells whose name contains this text.")] = "",
) -> None:
    """Train six iterations with 1, 2 and 4 learner workers; exit code 1 when one of them learns other bits.

    For each precision and each `group.max_lag`: one process, groups of three sizes, a group whose size changes twice,
    and one that loses a worker to `kill -9` during the backward passes.
    """
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for dtype in DTYPES:
        for lag in (0, 1):
            name = f"{dtype} max_lag={lag}"
            if only in name:
                cells[name] = {}
                for way, digests in _ways((f"model.dtype={dtype}", f"group.max_lag={lag}")):
                    cells[name][way] = digests
                    typer.echo(f"{name}, {way}: {', '.join(digest[:12] for digest in digests.values())}")
                    out.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    differing = [name for name, ways in cells.items() if any(own != ways["--local"] for own in ways.values())]
    typer.echo(f"{sum(map(len, cells.values()))} runs in {len(cells)} cells, {len(differing)} cells with other bits")
    raise typer.Exit(1 if differing else 0)


def _ways(words: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    yield "--local", _watched(words, "--local")
    for count in (1, 2, 4):
        yield f"{count} workers", _watched(words, f"cluster.learner.workers={count}")
    yield "1, 4, then 2 workers", _watched(words, then=_resize)
    yield "2 workers, one killed", _watched(words, "cluster.learner.workers=2", then=_kill)


def _watched(words: tuple[str, ...], *further: str, then: "Callable[[Run], None] | None" = None) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="same_bits_") as folder:
        run = Run(Path(folder) / "run", (*SIX, *words, *further))
        try:
            if then:
                then(run)
            run.finish()
            return dict(_files(run.folder))
        finally:
            run.process.kill()


class Run:
    """One `flowcredit train` in progress."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.folder = folder
        self._said = ""
        command = [sys.executable, "-u", "-m", "deploy", "train", *words, "--run", str(folder)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "RAY_ADDRESS": ""},
        )

    def wait_for(self, start: str) -> None:
        """Read up to a line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said += line
            if line.startswith(start):
                return
        raise RuntimeError(f"the run ended without the line {start!r}:\n{self._said}")

    def finish(self) -> None:
        """Wait for the end."""
        said, _ = self.process.communicate(timeout=TIMEOUT_S)
        if self.process.returncode:
            raise RuntimeError(f"the run failed:\n{self._said}{said}")

    def ask(self, *words: str) -> None:
        """Run `flowcredit` with a command for this run."""
        command = [sys.executable, "-m", "deploy", words[0], str(self.folder), *words[1:]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)

    def wait_until(self, holds: Callable[[RunStatus], bool]) -> None:
        """Wait for a status of which this holds."""

        async def wait() -> None:
            source = open_source(str(self.folder))
            try:
                while True:
                    status = await source.status(run_id_of(self.folder.name))
                    if status and holds(status):
                        return
                    await asyncio.sleep(0.5)
            finally:
                await source.close()

        asyncio.run(asyncio.wait_for(wait(), TIMEOUT_S))


def _resize(run: Run) -> None:
    """Change the number of workers from 1 to 4 and to 2, in pauses, so that the new ones are there in time."""
    for iteration, count in ((1, 4), (3, 2)):
        run.wait_for(f"iteration {iteration}/")
        run.ask("pause")
        run.wait_until(lambda status: status.phase == "paused")
        run.ask("scale", "learner", str(count))
        run.wait_until(lambda status, count=count: _ready(status) >= count)
        run.ask("resume")
    run.wait_for("iteration 6/")
    sizes = [line["update/workers"] for line in lines_of(run.folder) if "update/workers" in line]
    if set(sizes) != {1, 4, 2}:
        raise RuntimeError(f"the group must have had 1, 4 and 2 workers, got {sizes}")


def _ready(status: RunStatus) -> int:
    return next(pool.ready for pool in status.pools if pool.name == "learner")


def _kill(run: Run) -> None:
    """`kill -9` of a worker that computes gradients."""
    run.wait_for("iteration 2/")
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        for process in psutil.Process(run.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[:1] == [TRAINS]:
                    process.send_signal(signal.SIGKILL)
                    run.wait_for("iteration 6/")
                    events = (run.folder / "events.jsonl").read_text(encoding="utf-8")
                    if "learner_failed" not in events:
                        raise RuntimeError(f"the run must have noticed its dead worker, got {events}")
                    return
    raise RuntimeError("no learner worker computed gradients")


def _digests(arguments: list[list[str]]) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="same_bits_") as folder:
        run = Path(folder) / "run"
        for each in arguments:
            command = [sys.executable, "-m", "deploy", "train", *each, *SHORT_EVALUATION, "--run", str(run)]
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, env={**os.environ, "RAY_ADDRESS": ""}
            )
        yield from _files(run)


def _files(run: Path) -> Iterator[tuple[str, str]]:
    newest = max(path for path in (run / "checkpoints").iterdir() if not path.is_symlink())
    for name in FILES:
        yield name, hashlib.sha256((newest / name).read_bytes()).hexdigest()


if __name__ == "__main__":
    app()
