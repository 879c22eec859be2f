"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.presets import preset_names


def complete_preset(incomplete: str) -> list[str]:
    """Complete the name of a preset for a shell."""
    return [name for name in preset_names() if name.startswith(incomplete)]


Preset = Annotated[
    str, typer.Argument(help="Name of a preset, or path of a YAML file.", autocompletion=complete_preset)
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Config overrides, e.g. group.size=16 seed=3.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
Iteration = Annotated[int | None, typer.Option(help="Iteration of the checkpoint; default: the newest.")]
IsAverage = Annotated[bool, typer.Option("--average", help="Use the running average of the adapter (learner.average).")]
IsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Host = Annotated[str, typer.Option(help="Address to listen on; any other than loopback needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the bearer token; default: the environment variable FLOWCREDIT_TOKEN.")
]
AllowHost = Annotated[
    list[str] | None, typer.Option(help="A further name by which a server on loopback may be called; repeatable.")
]
