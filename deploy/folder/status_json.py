"""`status.json` of a run folder: what is left to see when the board is gone, and to go on with when the run died."""

import os
from pathlib import Path

from pydantic import Field

from deploy.folder.run_folder import STATUS
from protocol.commands import Command
from protocol.status import Document, Event, RunStatus


class StatusFile(Document):
    """What the file holds."""

    status: RunStatus
    events: list[Event] = Field(default_factory=list)
    commands: list[Command] = Field(default_factory=list)


def write_status(path: Path, text: str) -> None:
    """`status.json` of the run folder `path`, whole or not at all (OSError)."""
    partial = path / f".{STATUS}.partial"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path / STATUS)


def read_status(path: Path) -> StatusFile | None:
    """What it says; None when there is none, or one that cannot be understood."""
    try:
        return StatusFile.model_validate_json((path / STATUS).read_bytes())
    except (OSError, ValueError):
        return None
