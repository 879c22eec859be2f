"""Tables of results on standard output, in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table


def show(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows with equal keys; numbers get three decimals, and None a dash."""
    table = Table(*rows[0], title=title, box=MARKDOWN)
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    Console(width=250).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
