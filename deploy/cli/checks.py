"""The commands that check a machine or a run folder: `doctor` and `verify`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from deploy.cli.options import IsJson, Overrides, RunFolderArgument
from deploy.presets import load_config
from protocol.errors import ConfigError

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def doctor(
    preset: Annotated[
        str | None,
        typer.Argument(
            help="A preset whose model, prompts and rewards are checked too, and whether its estimated memory fits this"
            " machine's GPU."
        ),
    ] = None,
    overrides: Overrides = None,
    run: Annotated[Path, typer.Option(help="Folder that will hold the run folders.")] = Path("runs"),
    measures: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure forwards, gradients and decodings per second of the preset's model, with random weights, and"
            " each scorer's time for an image.",
        ),
    ] = False,
    is_json: IsJson = False,
) -> None:
    """Check whether this machine is ready; exit code 1 if something prevents a run."""
    from deploy.tools.doctor import Question, examine

    if measures and not preset:
        raise ConfigError("--measure needs a preset whose model is measured, got none: name one, such as sd35_geneval")
    config = load_config(preset, overrides=overrides or []) if preset else None
    findings = examine(Question(config=config, run=run, measures=measures))
    worst_first = sorted(findings, key=lambda each: -list(MARKS).index(each.verdict))
    _show(iter(worst_first), lambda row: row["verdict"], is_json=is_json)


def verify(run: RunFolderArgument, is_json: IsJson = False) -> None:
    """Check the manifests, metrics and group ledger of a run folder; exit code 1 if something is damaged.

    By the ledger no group may be missing or counted twice.
    """
    from deploy.tools.verify import verify as findings_of

    _show(findings_of(run), lambda row: "ok" if row["is_whole"] else "bad", is_json=is_json)


def _show(findings: Iterator[Any], verdict_of: Callable[[dict[str, Any]], str], *, is_json: bool) -> NoReturn:
    """Print findings, as text one by one, and end with exit code 1 if one of them is bad."""
    rows = []
    for row in map(asdict, findings):
        rows.append(row)
        if not is_json:
            remedy = f"\n      {'':18} -> {row['remedy']}" if row.get("remedy") else ""
            typer.echo(f"{MARKS[verdict_of(row)]}  {row['subject']:18} {row['found']}{remedy}")
    if is_json:
        typer.echo(json.dumps(rows, indent=1))
    raise typer.Exit(1 if "bad" in map(verdict_of, rows) else 0)
