"""Digests of what short runs learn: a refactoring changes no bit of any result, and neither does the learner group.

    python -m benchmarks.same_bits list --out before.json       # at the old commit
    python -m benchmarks.same_bits list --out after.json        # at the new commit, on the same machine
    python -m benchmarks.same_bits compare before.json after.json
    python -m benchmarks.same_bits workers --out workers.json   # the same bits for any number of workers
    python -m benchmarks.same_bits configs --out configs.json   # the merged config of every preset with every method

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
from typing import Annotated, Any

import typer

from benchmarks.output import write_json
from benchmarks.workers import workers
from deploy.presets import load_config, method_names, preset_names

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
        "toy_edit": [["toy_edit", "iterations=2", "--local"]],
        "toy_edit on Ray": [["toy_edit", "iterations=2", "cluster.rollout_actors=3"]],
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
            write_json(out, digests)


@app.command()
def configs(out: Annotated[Path, typer.Option(help="JSON file that receives the configs, by dotted key.")]) -> None:
    """Write the merged config of every preset with every method."""
    pairs = {
        f"{preset} {method}": _dotted(load_config(preset, overrides=[f"method={method}"]).model_dump(mode="json"))
        for preset in preset_names()
        for method in method_names()
    }
    write_json(out, pairs)
    keys = {key for config in pairs.values() for key in config}
    typer.echo(f"{len(pairs)} configs, {len(keys)} keys")


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two files of `list` or `configs`; exit code 1 if a run is missing or a value differs."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    shared = sorted(old.keys() & new.keys())
    for name in sorted(old.keys() ^ new.keys()):
        typer.echo(f"  {name}: only in {before if name in old else after}")
    changes: dict[str, list[str]] = {}
    for name in shared:
        for key in sorted(old[name].keys() | new[name].keys()):
            pair = [json.dumps(one[name].get(key, "absent")) for one in (old, new)]
            if pair[0] != pair[1]:
                changes.setdefault(f"{key}: {pair[0]}, now {pair[1]}", []).append(name)
    for change, names in changes.items():
        typer.echo(f"  {change}: {f'all {len(names)}' if len(names) == len(shared) else ', '.join(names)}")
    typer.echo(f"{len(shared)} compared, {len(changes)} differences")
    raise typer.Exit(1 if changes or old.keys() != new.keys() else 0)


def _dotted(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: value
        for name, branch in tree.items()
        for key, value in (
            _dotted(branch, f"{prefix}{name}.") if isinstance(branch, dict) else {prefix + name: branch}
        ).items()
    }


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
