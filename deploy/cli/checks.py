"""The commands that tell whether things are in order: `doctor` and `verify`."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.presets import load_config

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(doctor)
    app.command()(verify)


def doctor(
    preset: Annotated[str | None, typer.Argument(help="A preset whose model, prompts and rewards are checked.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides.")] = None,
    run: Annotated[Path, typer.Option(help="Where run folders are going to be.")] = Path("runs"),
) -> None:
    """Is this machine ready? One line each, with a remedy; exit code 1 when something stops a run."""
    from deploy.tools.doctor import Question, examine

    config = load_config(preset, overrides=overrides or []) if preset else None
    is_bad = False
    for finding in examine(Question(config=config, run=run)):
        is_bad |= finding.verdict == "bad"
        remedy = f"\n      {'':18} -> {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{MARKS[finding.verdict]}  {finding.subject:18} {finding.found}{remedy}")
    raise typer.Exit(1 if is_bad else 0)


def verify(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Check a run folder's manifests, metrics and ledger of groups; exit code 1 when something is not whole."""
    from deploy.tools.verify import verify as findings_of

    is_whole = True
    for finding in findings_of(run):
        is_whole &= finding.is_whole
        typer.echo(f"{MARKS['ok' if finding.is_whole else 'bad']}  {finding.subject:18} {finding.found}")
    raise typer.Exit(0 if is_whole else 1)
