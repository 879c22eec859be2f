"""The commands that check a machine or a run folder: `doctor` and `verify`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import IsJson, Overrides, RunFolder
from deploy.presets import load_config
from protocol.errors import ConfigError

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def doctor(
    preset: Annotated[
        str | None, typer.Argument(help="A preset whose model, prompts and rewards are checked too.")
    ] = None,
    overrides: Overrides = None,
    run: Annotated[Path, typer.Option(help="Folder that will hold the run folders.")] = Path("runs"),
    measures: Annotated[
        bool,
        typer.Option("--measure", help="Measure forwards, gradients and decodings per second of the preset's model."),
    ] = False,
    is_json: IsJson = False,
) -> None:
    """Check whether this machine is ready; exit code 1 if something prevents a run."""
    from deploy.tools.doctor import Question, examine

    if measures and not preset:
        raise ConfigError("--measure needs a preset whose model is measured, got none: name one, such as sd35_geneval")
    config = load_config(preset, overrides=overrides or []) if preset else None
    findings = examine(Question(config=config, run=run, measures=measures))
    is_bad = False
    if is_json:
        findings = list(findings)
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        raise typer.Exit(1 if any(finding.verdict == "bad" for finding in findings) else 0)
    for finding in findings:
        is_bad |= finding.verdict == "bad"
        remedy = f"\n      {'':18} -> {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{MARKS[finding.verdict]}  {finding.subject:18} {finding.found}{remedy}")
    raise typer.Exit(1 if is_bad else 0)


def verify(run: RunFolder, is_json: IsJson = False) -> None:
    """Check the manifests, metrics and group ledger of a run folder; exit code 1 if something is damaged."""
    from deploy.tools.verify import verify as findings_of

    if is_json:
        findings = list(findings_of(run))
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        raise typer.Exit(0 if all(finding.is_whole for finding in findings) else 1)
    is_whole = True
    for finding in findings_of(run):
        is_whole &= finding.is_whole
        typer.echo(f"{MARKS['ok' if finding.is_whole else 'bad']}  {finding.subject:18} {finding.found}")
    raise typer.Exit(0 if is_whole else 1)
