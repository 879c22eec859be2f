"""What Ray's exceptions at the start of a run mean, and what helps: one line for each cause that can be recognised.

Ray raises few types of exceptions. So a cause is recognised by a sentence in the messages of the exception and of those
that led to it, and by the state of the machine where Ray only says that it waited in vain.
"""

import errno
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from protocol.errors import ConfigError, named_line, one_line

LOOPBACK = "127.0.0.1"
LOOPBACK_S = 5.0
"""Seconds in which this machine must reach itself; Ray itself would try for many minutes."""
ANSWER_S = 30.0
"""Seconds in which a cluster's head must greet; Ray itself waits for minutes for a program that never will."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of gRPC, which the head of a cluster speaks, begins: HTTP/2's preface and an empty frame of settings."""
SETTINGS = 4
"""Type of the frame with which a server of gRPC begins, the fourth byte of its answer."""
HEAD = 4
"""Bytes of an answer that hold the type."""
LEAST_ROOM = 2**20
"""Free bytes without which Ray's processes cannot write their logs."""
LEAST_PORTS = 32
"""Free ports that the processes of a small local cluster need."""

ROOM = "free some space there, or set RAY_TMPDIR to a folder with room"
PORTS = "end programs that keep ports open, or widen net.ipv4.ip_local_port_range"
STARTS = (
    (r"cannot exceed \d+ bytes|File name too long", "set RAY_TMPDIR to a folder with a short path"),
    (r"No space left on device|Disk quota exceeded", ROOM),
    (
        r"Permission denied|Operation not permitted|Read-only file system",
        "Ray writes to RAY_TMPDIR (/tmp) and HOME: make them writable, or set RAY_TMPDIR to another folder",
    ),
    (r"Not a directory|File exists", "RAY_TMPDIR must be a folder: set it to one"),
    (r"[Aa]ddress already in use|Cannot assign requested address|[Ff]ailed to bind", PORTS),
    (r"Too many open files", "raise the limit of open files, `ulimit -n`"),
    (
        r"can't start new thread|Resource temporarily unavailable|Cannot allocate memory",
        "end other programs, or raise the limit of processes, `ulimit -u`",
    ),
    (r"codec can't encode", "Ray takes only UTF-8: rename the working folder, and use only UTF-8 in the command"),
)
"""What a line about a start holds, and the remedy; the first that fits counts."""
WAITED = r"timed out|Timed out|Failed to start GCS"
VERSIONS = re.compile(r"Version mismatch.*?Ray: (\S+)\s+Python: (\S+).*?Ray: (\S+)\s+Python: (\S+)", re.DOTALL)
TOKEN = r"Unauthenticated|InvalidAuthToken|[Aa]uthentication token"
ENVIRONMENT = r"Failed to merge the Job's runtime env"


def not_started(error: Exception) -> ConfigError:
    """Explain why Ray does not start on this machine, with the remedy."""
    line, remedy = _recognised(error) or (named_line(error), None)
    if remedy is None and re.search(WAITED, line):
        remedy = _state_of_machine() or (
            f"the machine may have been too busy: try again, or look at the logs in {_folder()}/ray/session_latest/logs"
        )
    remedy = remedy or "its folders, RAY_TMPDIR (/tmp) and HOME, must be writable, have room and short names"
    return ConfigError(f"Ray does not start on this machine: {one_line(line)}; {remedy}; --local does without Ray")


def not_connected(error: Exception, address: str) -> ConfigError:
    """Explain why this process cannot use the cluster at an address, with the remedy."""
    said = _said(error)
    if found := VERSIONS.search(said):
        theirs, ours = f"Ray {found[1]} with Python {found[2]}", f"Ray {found[3]} with Python {found[4]}"
        return ConfigError(
            f"this process must have the versions of the Ray cluster at {address}, {theirs}, got {ours}: install the"
            " cluster's"
        )
    if re.search(TOKEN, said):
        return ConfigError(
            f"the Ray cluster at {address} asks for its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or"
            " ~/.ray/auth_token to the cluster's"
        )
    if re.search(ENVIRONMENT, said):
        return ConfigError(
            f"the runtime_env of the Ray job sets what flowcredit sets too: {one_line(error)}; leave that out"
        )
    return ConfigError(f"no Ray cluster answers at {address}: {one_line(error)}; check cluster.address or RAY_ADDRESS")


def require_own_machine() -> None:
    """Check that this machine reaches itself, as a local cluster must, at the addresses that Ray takes.

    Raises:
        ConfigError: it does not.
    """
    from ray.util import get_node_ip_address

    _require_reached(LOOPBACK, "start the loopback interface (ip link set lo up) and let no firewall close it")
    # Without a network Ray takes the address that /etc/hosts gives to this machine's name.
    _require_reached(get_node_ip_address(), f"correct the line of {socket.gethostname()} in /etc/hosts")


def _require_reached(address: str, remedy: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as door:
            socket.create_connection(door.getsockname()[:2], timeout=LOOPBACK_S).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EMFILE, errno.ENFILE):
            raise not_started(error) from None
        raise ConfigError(
            f"this machine must reach itself at {address} for a Ray of its own: {one_line(error)}; {remedy}; --local"
            " does without Ray"
        ) from None


def require_head(address: str, *, timeout_s: float) -> None:
    """Check that `host:port` or `SCHEME://host:port` accepts connections, and that `host:port` greets as gRPC does.

    The head of a cluster speaks gRPC. With TLS, or if a scheme is named, only the connection is tried; an address
    without a port is not tried.

    Args:
        address: of the cluster.
        timeout_s: seconds in which a connection must be there; an answer may take `ANSWER_S`.

    Raises:
        OSError: no connection in time, no answer in time, or another program listens there.
        ValueError: the port is not a number.
        OverflowError: the number is not a port.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as line:
        if "://" in address or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        line.settimeout(ANSWER_S)
        line.sendall(GREETING)
        answer = b""
        try:
            while len(answer) < HEAD and (more := line.recv(HEAD)):
                answer += more
        except TimeoutError:
            raise TimeoutError(f"what listens there says nothing for {ANSWER_S:g} s") from None
    if answer[3:4] != bytes([SETTINGS]):
        raise ConnectionError(
            "another program listens there; the head of a cluster has port 6379 unless `ray start` gave it another, and"
            " 8265 is its dashboard"
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, newest first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _said(error: Exception) -> str:
    return "\n".join(f"{type(each).__name__}: {each}" for each in _chain(error))


def _recognised(error: Exception) -> tuple[str, str] | None:
    """Return the first line that names a known cause, and its remedy; None if no line does."""
    lines = (line for each in _chain(error) for line in (named_line(each), *str(each).splitlines()))
    found = ((line, remedy) for line in lines for sign, remedy in STARTS if re.search(sign, line))
    return next(found, None)


def _folder() -> str:
    """Return the folder in which Ray keeps its own, as Ray chooses it."""
    variables = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    return next((os.environ[name] for name in variables if name in os.environ), "/tmp")


def _state_of_machine() -> str | None:
    """Find what a start waited for in vain; None if nothing is lacking now."""
    with suppress(OSError):
        if shutil.disk_usage(_folder()).free < LEAST_ROOM:
            return f"no space is left in {_folder()}: {ROOM}"
    try:
        with ExitStack() as held:
            for _ in range(LEAST_PORTS):
                held.enter_context(socket.create_server((LOOPBACK, 0)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"fewer than {LEAST_PORTS} ports are free: {PORTS}"
    return None
