"""The status part of the config: where a run shows itself. Nothing here changes a result."""

import os
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from protocol.config.section import Section

EMBEDDED, OFF = "embedded", "off"
BOARD_VARIABLE = "FLOWCREDIT_BOARD"
SCHEMES = ("redis", "rediss", "unix")


class StatusConfig(Section):
    """What people can see of a run while it goes."""

    board: str = EMBEDDED
    """`embedded` starts a server that lives as long as the run, `off` shows nothing; otherwise a `redis://`,
    `rediss://` or `unix://` address. The environment's FLOWCREDIT_BOARD goes before it, and may hold a password."""
    heartbeat_s: float = Field(default=1.0, gt=0.0, le=60.0)
    """Seconds between two looks at the board: writing the status, reading what is asked for."""
    keep_days: float = Field(default=7.0, gt=0.0)
    """Days that a board keeps a run after its last sign of life."""
    trajectories: int = Field(default=2, ge=0, le=16)
    """Trajectories whose images are recorded; 0 records none."""
    trajectories_every: int = Field(default=5, ge=1)
    """Iterations between two recordings; the first iteration is recorded too."""
    trackers: tuple[str, ...] = ()
    """`tensorboard`, `wandb`, or `package.module:Class` of your own."""

    @model_validator(mode="after")
    def _is_board(self) -> Self:
        if self.board in (EMBEDDED, OFF):
            return self
        parts = urlsplit(self.board)
        _ = parts.port  # raises ValueError when it is no number
        if parts.scheme not in SCHEMES:
            raise ValueError(
                f"status.board must be {EMBEDDED}, {OFF} or an address with {', '.join(SCHEMES)}, got {parts.scheme!r}"
            )
        if parts.password or "password=" in parts.query:
            raise ValueError(
                "status.board must hold no password, since the config is written to the run folder:"
                " set it in the environment's FLOWCREDIT_BOARD"
            )
        return self


def board_address(settings: StatusConfig) -> str:
    """Where a run shows itself: `embedded`, `off` or an address; the environment goes before the config."""
    return os.environ.get(BOARD_VARIABLE) or settings.board
