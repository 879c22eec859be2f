"""Digests of what short runs learn: a refactoring changes no bit of any result, and neither does the learner group.

    python -m benchmarks.same_bits list --out before.json       # at the old commit
    python -m benchmarks.same_bits list --out after.json        # at the new commit, on the same machine
    python -m benchmarks.same_bits compare before.json after.json
    python -m benchmarks.same_bits workers --out workers.json   # the same bits for any number of workers

Every run of `list` is a process of its own: `python -m flowcredit train` with the toy world. The digests are the sha256
of the adapter's and the optimizer's file in the newest checkpoint. They are only comparable on equal machines with
equal library versions.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.workers import workers
from deploy.presets import method_names

FILES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors")
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
    for method in method_names():
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


app.command()(workers)


def _digests(arguments: list[list[str]]) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="same_bits_") as folder:
        run = Path(folder) / "run"
        for each in arguments:
            command = [sys.executable, "-m", "flowcredit", "train", *each, *SHORT_EVALUATION, "--run", str(run)]
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
