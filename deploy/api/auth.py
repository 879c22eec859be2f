"""Who may read and who may control: one bearer token, compared in constant time."""

import hmac
import ipaddress
import os
from pathlib import Path

from deploy.api.problems import Problem
from protocol.errors import ConfigError

TOKEN_VARIABLE = "FLOWCREDIT_TOKEN"
SHORTEST_TOKEN = 16
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Access:
    """Made at the start of a server.

    Raises:
        ConfigError: bound to other than loopback without a token.
    """

    def __init__(self, *, host: str, token: str | None, allowed_hosts: tuple[str, ...] = ()) -> None:
        self._token = token
        self._is_open = is_loopback(host)
        self._names = {name.lower() for name in (*LOOPBACK_NAMES, *allowed_hosts)}
        if not self._is_open and token is None:
            raise ConfigError(
                f"a server on {host} can be reached by others and needs a token: set {TOKEN_VARIABLE} or --token-file"
            )

    def is_known_host(self, header: str) -> bool:
        """On loopback only names of this machine count, so that no site can point its own name at the server."""
        if not self._is_open:
            return True
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        return name.strip("[]").lower() in self._names

    def require_reader(self, authorization: str | None) -> None:
        """Raises Problem 401."""
        if not self._is_open:
            self._require(authorization)

    def require_controller(self, authorization: str | None) -> None:
        """Raises Problem 401, and 403 when the server has no token."""
        if self._token is None:
            raise Problem(403, f"control needs a token: start the server with {TOKEN_VARIABLE} or --token-file")
        self._require(authorization)

    def _require(self, authorization: str | None) -> None:
        scheme, _, given = (authorization or "").partition(" ")
        held = (self._token or "").encode()
        is_right = hmac.compare_digest(given.strip().encode(), held)
        if scheme.lower() != "bearer" or not is_right:
            raise Problem(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: Path | None) -> str | None:
    """The token of a file, else of the environment.

    Raises:
        ConfigError: the file cannot be read, or the token is too short.
    """
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {file} cannot be read: {error}") from None
        where = str(file)
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < SHORTEST_TOKEN or not token.isascii():
        raise ConfigError(f"the token in {where} must have at least {SHORTEST_TOKEN} ASCII characters")
    return token
