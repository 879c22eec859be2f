"""The commands that check a machine or a run folder: `doctor` and `verify`."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import Overrides, RunFolder
from deploy.presets import load_config

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def doctor(
    preset: Annotated[
        str | None, typer.Argument(help="A preset whose model, prompts and rewards are checked too.")
    ] = None,
    overrides: Overrides = None,
    run: Annotated[Path, typer.Option(help="Folder that run folders will be in.")] = Path("runs"),
) -> None:
    """Check whether this machine is ready; exit code 1 if something prevents a run."""
    from deploy.tools.doctor import Question, examine

    config = load_config(preset, overrides=overrides or []) if preset else None
    is_bad = False
    for finding in examine(Question(config=config, run=run)):
        is_bad |= finding.verdict == "bad"
        remedy = f"\n      {'':18} -> {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{MARKS[finding.verdict]}  {finding.subject:18} {finding.found}{remedy}")
    raise typer.Exit(1 if is_bad else 0)


def verify(run: RunFolder) -> None:
    """Check the manifests, metrics and group ledger of a run folder; exit code 1 if something is damaged."""
    from deploy.tools.verify import verify as findings_of

    is_whole = True
    for finding in findings_of(run):
        is_whole &= finding.is_whole
        typer.echo(f"{MARKS['ok' if finding.is_whole else 'bad']}  {finding.subject:18} {finding.found}")
    raise typer.Exit(0 if is_whole else 1)
