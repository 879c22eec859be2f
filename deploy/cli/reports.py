"""The commands that show what runs have come to: `report` and `compare`.

RUN is a run folder, or the name of a run in `runs/`.
"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import IsJson
from deploy.folder.location import found_run


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or names of runs in runs/.")],
    out: Annotated[Path, typer.Option(help="HTML file to write; an earlier report there is replaced.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML file about one or many runs: curves, gains, trajectories, before and after, configs.

    Runs that differ only in their seed become one line with a band. The file needs no network.
    """
    from deploy.report.page import write_report

    typer.echo(write_report([found_run(run) for run in runs], out))


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the name of a run in runs/.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another one.")],
    is_json: IsJson = False,
) -> None:
    """Compare two runs in a table; held-out scores with paired bootstrap intervals over the prompts."""
    from rich.console import Console

    from deploy.cli.tables import show_comparison
    from deploy.report.compare import compare as comparison_of

    found = comparison_of(found_run(first), found_run(second))
    if is_json:
        typer.echo(found.model_dump_json(indent=1))
        return
    Console(markup=False, emoji=False, highlight=False).print(show_comparison(found))
