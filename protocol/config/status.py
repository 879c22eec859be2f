"""The section `status`: where a run publishes its status. Nothing in it changes a result."""

import os
import re
from typing import Self

from pydantic import Field, model_validator

from protocol.config.section import Section
from protocol.errors import ConfigError

EMBEDDED, OFF = "embedded", "off"
BOARD_VARIABLE = "FLOWCREDIT_BOARD"
SCHEMES = ("redis", "rediss", "unix")
_ADDRESS = re.compile(
    r"""(?P<scheme>[a-z][a-z0-9+.-]*)://
    (?P<user>[^@/?#\[\]\s]*@)?
    (?P<where>(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:/[0-9]*)? | (?<=[/@])/[^@?#]*)
    (?P<options>\?[^@?#\s]*)?""",
    re.VERBOSE,
)
"""The only form of an address that every parser splits alike, so that it is certain what of it is a password."""


class StatusConfig(Section):
    """What a run publishes about itself."""

    board: str = EMBEDDED
    """The status board. `embedded` starts a server for the run, `off` publishes nothing; otherwise a `redis://`,
    `rediss://` or `unix://` address. FLOWCREDIT_BOARD in the environment overrides it, and may hold a password."""
    heartbeat_s: float = Field(default=1.0, gt=0.0, le=60.0)
    """Seconds between two exchanges with the board, which write the status and read commands; in (0, 60]."""
    keep_days: float = Field(default=7.0, gt=0.0)
    """Days for which a board keeps a run after its last heartbeat, above 0."""
    trajectories: int = Field(default=2, ge=0, le=16)
    """Trajectories of a recorded iteration whose images are kept, 0 to 16; 0 records none."""
    trajectories_every: int = Field(default=5, ge=1)
    """Iterations between two recorded ones, at least 1; the first iteration is always recorded."""
    trackers: tuple[str, ...] = ()
    """Metric trackers: `tensorboard`, `wandb`, or the import path `package.module:Class` of your own."""

    @model_validator(mode="after")
    def _is_board(self) -> Self:
        if self.board in (EMBEDDED, OFF):
            return self
        try:
            check_address(self.board)
        except ConfigError as error:
            raise ValueError(f"status.board must be {EMBEDDED}, {OFF} or an address: {error}") from None
        found = _ADDRESS.fullmatch(self.board)
        if found and (":" in (found["user"] or "") or "password" in (found["options"] or "").lower()):
            raise ValueError(
                "status.board must hold no password, since the config is written to the run folder:"
                " set it in the environment's FLOWCREDIT_BOARD"
            )
        return self


def check_address(address: str) -> None:
    """Check the form of a board's address; a password in it is never part of the message.

    Raises:
        ConfigError: another scheme, or a form in which it is not certain what the password is.
    """
    found = _ADDRESS.fullmatch(address)
    if address.partition("://")[0] not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"a board's address must begin with {schemes}, got {without_password(address)}")
    if found is None or (found["scheme"] == "unix") != found["where"].startswith("/"):
        raise ConfigError(
            f"the board's address {without_password(address)} is not usable: write redis://USER:PASSWORD@HOST:PORT/0"
            " or unix://USER:PASSWORD@/PATH, and %XX for each of @ / ? # % [ ] and spaces in user and password"
        )


def without_password(address: str) -> str:
    """Return what of an address may be shown to anybody: scheme, host, port, database or path.

    Where it is not certain which part is the password, only the scheme is shown.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        scheme = address.partition("://")[0]
        return f"{scheme}://…" if re.fullmatch(r"[a-z][a-z0-9+.-]{0,30}", scheme) and "://" in address else "…"
    return f"{found['scheme']}://{found['where']}"


def shown_source(where: str) -> str:
    """Return a folder or an address as it may be shown to anybody."""
    return without_password(where) if re.search(r"://|:.*@", where) else where


def board_address(settings: StatusConfig) -> str:
    """Return the board of a run: `embedded`, `off` or an address. The environment overrides the config."""
    return os.environ.get(BOARD_VARIABLE) or settings.board
