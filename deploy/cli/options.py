"""Arguments, options and output that several commands share."""

import ipaddress
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.presets import preset_names


def complete_preset(incomplete: str) -> list[str]:
    """Complete the name of a preset for a shell."""
    return [name for name in preset_names() if name.startswith(incomplete)]


BETWEEN = "\0"
"""Stands for the `--` between two groups of runs; no run has this name."""
Preset = Annotated[
    str, typer.Argument(help="Name of a preset, or path of a YAML file.", autocompletion=complete_preset)
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Config overrides, e.g. group.size=16 seed=3.")]
RunFolderArgument = Annotated[Path, typer.Argument(help="A run folder.")]
Iteration = Annotated[int | None, typer.Option(min=0, help="Iteration of the checkpoint; default: the newest.")]
IsBest = Annotated[bool, typer.Option("--best", help="Take the checkpoint with the highest held-out score.")]
IsLocal = Annotated[bool, typer.Option("--local", help="Run in one process without Ray; the results are the same.")]
IsAverage = Annotated[bool, typer.Option("--average", help="Use the running mean of the adapter (learner.average).")]
AdapterShare = Annotated[
    float,
    typer.Option(
        metavar="S",
        help="Share of the steps, above 0 and up to 1, that the adapter takes, from the first: the nearest whole"
        " number, a half upwards, at least one; the base model takes the others. PNGs, evaluation.json and"
        " --json hold it.",
    ),
]
IsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Host = Annotated[str, typer.Option(help="Address to listen on; any other than loopback needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the bearer token; default: the environment variable FLOWCREDIT_TOKEN.")
]
AllowHost = Annotated[
    list[str] | None, typer.Option(help="Another host name to which a server on loopback answers; repeatable.")
]


def _networks(given: list[str] | None) -> list[str] | None:
    for each in given or ():
        try:
            ipaddress.ip_network(each, strict=False)
        except ValueError:
            raise typer.BadParameter(f"must be an address such as 10.0.0.7 or 10.0.0.0/8, got {each[:60]!r}") from None
    return given


Proxy = Annotated[
    list[str] | None,
    typer.Option(
        "--proxy",
        callback=_networks,
        help="Address of a proxy in front of the server: X-Forwarded-For then names its clients, which otherwise share"
        " the limits of one; repeatable.",
    ),
]


def show_rows(rows: Sequence[dict[str, Any]], line: Callable[[dict[str, Any]], str], *, is_json: bool) -> None:
    """Print a table.

    Args:
        line: makes a line of text from a row.
    """
    for text in [json.dumps(rows, indent=1)] if is_json else map(line, rows):
        typer.echo(text)


def source_and_words(
    preset: str | None, overrides: list[str] | None, run: Path | None, other: str
) -> tuple[str | Path, list[str]]:
    """Return a preset, or the config file of a run if no preset is named, and the overrides.

    Args:
        preset: the first word of the command; an override if there is no preset.
        other: another way to name the run, for the error.

    Returns:
        The preset's name or the path of a YAML file; the overrides.

    Raises:
        InputError: neither preset nor run, or the run cannot be read.
    """
    from deploy.folder.read import source_of

    words = overrides or []
    if preset is not None and "=" in preset and not preset.endswith((".yaml", ".yml")):
        preset, words = None, [preset, *words]
    return source_of(preset, run, other), words
