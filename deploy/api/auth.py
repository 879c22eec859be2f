"""Access to the HTTP services: one bearer token, compared in constant time."""

import hmac
import ipaddress
import os
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.params import Depends as Dependency
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from deploy.api.problems import Problem
from protocol.errors import ConfigError, one_line

TOKEN_VARIABLE = "FLOWCREDIT_TOKEN"
SHORTEST_TOKEN = 16
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
BEARER = HTTPBearer(auto_error=False)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]


class Access:
    """The rights on one server; `to_read`, `to_call` and `to_control` are dependencies of its routes.

    `to_read` needs the token unless the server listens on loopback, `to_call` if the server has one, `to_control`
    always.
    """

    def __init__(self, *, host: str, token: str | None, allowed_hosts: tuple[str, ...] = ()) -> None:
        """Keep the token.

        Args:
            host: the address that the server listens on.
            token: the bearer token; None for a server without one.
            allowed_hosts: further names by which a server on loopback may be called.

        Raises:
            ConfigError: there is no token although other machines can reach `host`.
        """
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"a server on {host} is open to other machines and needs a token: set {TOKEN_VARIABLE} or --token-file"
            )
        self._token = token
        self.hosts = (*LOOPBACK_NAMES, host, *allowed_hosts) if is_loopback(host) else ()
        """Names that a request's Host header may hold; all if empty."""
        self.to_control: list[Dependency] = [Depends(self.require_token)]
        self.to_call = self.to_control if token else []
        self.to_read = [] if is_loopback(host) else self.to_control

    def require_token(self, given: Credentials) -> None:
        """Raise Problem 401 for a missing or wrong token, 403 if the server has none."""
        if self._token is None:
            raise Problem(403, f"control needs a token: start the server with {TOKEN_VARIABLE} or --token-file")
        if given is None or not hmac.compare_digest(given.credentials.strip().encode(), self._token.encode()):
            raise Problem(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    async def admit(self, request: Request) -> None:
        """Check the token as `require_token` does, by the head of a request, before its body is read."""
        self.require_token(await BEARER(request))


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: Path | None) -> str | None:
    """Read the token from a file, or from the environment; None if neither is given.

    Raises:
        ConfigError: the file cannot be read, or the token is too short.
    """
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {file} cannot be read: {one_line(error)}") from None
    elif not (token := os.environ.get(TOKEN_VARIABLE, "").strip()):
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii():
        raise ConfigError(f"the token in {file or TOKEN_VARIABLE} must have at least {SHORTEST_TOKEN} ASCII characters")
    return token
