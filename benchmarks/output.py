"""What benchmarks print and write."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from protocol.ground.files import write_whole


def show(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows with equal keys in Markdown; numbers get three decimals, and None a dash."""
    table = Table(*rows[0], title=title, box=MARKDOWN)
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    Console(width=250).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def write_json(path: Path, tree: Any) -> None:
    """Write results; the file's folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tree, indent=1) + "\n")
