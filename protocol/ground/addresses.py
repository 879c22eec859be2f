"""Addresses of a status board: their form, and the part of them that may be shown; and other secrets of a run.

No library is needed here, so that the command line starts fast.
"""

import re
from collections.abc import Mapping

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
"""The form of an address that every parser splits in the same way, so that it is certain which part is the password."""

SECRET_NAME = re.compile(r"PASSWORD$|(^|_)(TOKEN|SECRET|KEY)$")


def check_address(address: str) -> None:
    """Check the form of a board's address; a password in it is never part of the message.

    Raises:
        ConfigError: another scheme, or a form in which it is not certain which part is the password.
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
    """Return the part of an address that may be shown to anybody: scheme, host, port, database or path.

    Where it is not certain which part is the password, only the scheme is shown.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        scheme = address.partition("://")[0]
        return f"{scheme}://…" if re.fullmatch(r"[a-z][a-z0-9+.-]{0,30}", scheme) and "://" in address else "…"
    return f"{found['scheme']}://{found['where']}"


def is_secret_free(address: str) -> bool:
    """Tell whether an address of the right form holds no password."""
    found = _ADDRESS.fullmatch(address)
    return found is None or not (":" in (found["user"] or "") or "password" in (found["options"] or "").lower())


def secrets_among(variables: Mapping[str, str]) -> list[str]:
    """List the environment variables that hold a secret: by their names, or as an address with a password."""
    return [
        name
        for name, value in variables.items()
        if SECRET_NAME.search(name) or re.search(r"://([^/?]*:[^/?]+@|.*password=)", value)
    ]


def shown_source(where: str) -> str:
    """Return a folder or an address as it may be shown to anybody."""
    return without_password(where) if re.search(r"://|:.*@", where) else where
