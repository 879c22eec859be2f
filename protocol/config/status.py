"""The section `status`: where a run publishes its status. Nothing in it changes a result."""

import os
from typing import Annotated, Self

from pydantic import Field, model_validator

from protocol.config.section import WORD_OFF, Section
from protocol.errors import ConfigError
from protocol.ground.addresses import BOARD_VARIABLE, EMBEDDED, OFF, check_address, is_secret_free


class StatusConfig(Section):
    """What a run publishes about itself."""

    board: Annotated[str, WORD_OFF] = EMBEDDED
    """The status board. `embedded` starts a server for the run, `off` publishes nothing; otherwise a `redis://`,
    `rediss://` or `unix://` address. FLOWCREDIT_BOARD in the environment overrides it, and may hold a password."""
    heartbeat_s: float = Field(default=1.0, gt=0.0, le=60.0)
    """Seconds between two exchanges with the board, which write the status and read commands; in (0, 60]."""
    keep_days: float = Field(default=7.0, ge=0.001, le=36500.0)
    """Days for which a board keeps a run after its last heartbeat, at least 0.001, which is a minute and a half, and
    at most 36500."""
    trajectories: int = Field(default=2, ge=0, le=16)
    """Trajectories of a recorded iteration whose images are kept, 0 to 16; 0 records none."""
    trajectories_every: int = Field(default=5, ge=1)
    """Iterations between two recorded ones, at least 1; the first iteration is always recorded."""
    trackers: tuple[str, ...] = ()
    """Metric trackers: `tensorboard`, `wandb`, `mlflow`, or the import path `package.module:Class` of your own."""

    @model_validator(mode="after")
    def _is_board(self) -> Self:
        if self.board in (EMBEDDED, OFF):
            return self
        try:
            check_address(self.board)
        except ConfigError as error:
            raise ValueError(f"status.board must be {EMBEDDED}, {OFF} or an address: {error}") from None
        if not is_secret_free(self.board):
            raise ValueError(
                "status.board must hold no password, since the config is written to the run folder:"
                " set it in the environment's FLOWCREDIT_BOARD"
            )
        return self


def board_address(settings: StatusConfig) -> str:
    """Return the board of a run: `embedded`, `off` or an address. The environment overrides the config."""
    return os.environ.get(BOARD_VARIABLE) or settings.board
