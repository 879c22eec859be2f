"""The right to write into a run folder: one process at a time, also across machines that share the disk.

    .lease/token_000003      {"host", "boot", "pid", "run", "beats", "is_released"}

The process that made the highest token holds the lease. A token is made with O_EXCL, so only one of two processes gets
the next one. The holder increments `beats` every few seconds. A lease is free if no process holds it, or if its holder
is dead: a holder on this machine is dead when the folder's flock is free; one on another machine is dead when its beats
do not change for `STALE_S` seconds on the clock of the waiting process, so clocks need not agree. Before each write the
holder looks for a higher token, so a process that was suspended for too long does not write any more. `run` is a random
id made with the first token and copied to each later one: it identifies the run folder on any machine. A token with
another id shows the holder that its folder was removed and that another process has begun a run at the same path.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.folder.names import LEASE
from protocol.errors import LeaseLostError, RunFolderError

log = logging.getLogger(__name__)
BEAT_S, STALE_S = 5.0, 30.0
WIDTH = 256
"""Bytes of a token; constant, so that a beat needs no space on a full disk."""


class Lease:
    """The lease of a run folder, held from `take` to `release`.

    lease = Lease.take(run_folder)
    lease.require()                  # before each write
    lease.release()
    """

    def __init__(self, folder: Path, lock: int, token: int, run: str) -> None:
        """
        Args:
            lock: number of the open file that is locked.
            token: counts the leases of this folder so far.
        """
        self._folder = folder
        self._lock = lock
        self._token = token
        self._run = run
        self._beats = 0
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    @classmethod
    def take(cls, run: Path, *, stale_s: float = STALE_S, say: Callable[[str], None] = log.warning) -> "Lease":
        """Become the writer of an existing run folder; wait up to `stale_s` seconds for a beat from another machine.

        Args:
            stale_s: seconds without a beat after which a holder on another machine counts as dead.

        Raises:
            RunFolderError: another process holds it.
        """
        lock, is_sure = _locked(run)
        try:
            (run / LEASE).mkdir(exist_ok=True)
            held = _newest(run / LEASE)
            if held and not _is_free(run / LEASE, held, is_sure=is_sure, stale_s=stale_s, say=say):
                raise _in_use(run, _read(run / LEASE, held))
            token, name = held + 1, _read(run / LEASE, held).get("run") or uuid.uuid4().hex
            try:
                _create(run / LEASE, token, name)
            except FileExistsError:
                raise _in_use(run, _read(run / LEASE, token)) from None
        except BaseException:
            os.close(lock)
            raise
        for old in (run / LEASE).glob("token_*"):
            if old.name < _name(token):
                old.unlink(missing_ok=True)
        lease = cls(run / LEASE, lock, token, name)
        lease._thread.start()
        return lease

    @property
    def identity(self) -> str:
        """Return the run folder's identity: the same for all its holders, but different for a copy of the folder."""
        return f"{self._run}-{self._folder.stat().st_ino}"

    def require(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            LeaseLostError: another process has taken over.
        """
        newest = _newest(self._folder)
        holder = _read(self._folder, newest)
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        if holder.get("run", self._run) != self._run:
            raise LeaseLostError(
                f"run folder {self._folder.parent} was removed, and {who} has begun a run there: this one must not"
                " write any more"
            )
        if newest > self._token:
            raise LeaseLostError(
                f"run folder {self._folder.parent} was taken over by {who}: this one was silent too long and must not"
                " write any more"
            )

    def release(self) -> None:
        self._ended.set()
        self._thread.join(timeout=BEAT_S)
        with suppress(OSError):
            self._write(is_released=True)
        os.close(self._lock)

    def clear(self) -> None:
        """Remove the tokens before the folder itself is removed; other processes are kept out until `release`."""
        with suppress(OSError):
            for token in self._folder.glob("token_*"):
                token.unlink()
            self._folder.rmdir()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beats += 1
            try:
                self._write(is_released=False)
            except OSError as error:
                log.warning("the lease of %s could not be renewed: %s", self._folder.parent, error)

    def _write(self, *, is_released: bool) -> None:
        """Write the token, unless it belongs to another run, which has begun in a new folder at the same path."""
        with self._writing:
            descriptor = os.open(self._folder / _name(self._token), os.O_RDWR)
            try:
                if _facts(os.pread(descriptor, WIDTH, 0)).get("run", self._run) != self._run:
                    return
                os.pwrite(descriptor, _content(self._run, self._beats, is_released=is_released), 0)
            finally:
                os.close(descriptor)


def _locked(run: Path) -> tuple[int, bool]:
    """Keep out other processes of this machine; return a descriptor, and whether the disk has locks."""
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _in_use(run, _read(run / LEASE, _newest(run / LEASE))) from None
    except OSError:
        log.warning("run folder %s cannot be locked: its disk has no locks; only the lease's beats count", run)
        return descriptor, False
    return descriptor, True


def _is_free(folder: Path, token: int, *, is_sure: bool, stale_s: float, say: Callable[[str], None]) -> bool:
    """Return whether a token's holder has ended; `is_sure` if no process of this machine holds the folder's lock."""
    holder = _read(folder, token)
    if holder.get("is_released"):
        return True
    if is_sure and (holder.get("host"), holder.get("boot")) == (socket.gethostname(), _boot()):
        return True
    say(
        f"run folder {folder.parent} was last held by process {holder.get('pid')} on {holder.get('host')};"
        f" waiting {stale_s:g} s for a sign of life"
    )
    deadline = time.monotonic() + stale_s
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_S, stale_s / 10))
        if _newest(folder) != token or _read(folder, token).get("beats") != holder.get("beats"):
            return False
    return True


def has_ended(run: Path) -> bool:
    """Return whether the holder of a run folder has certainly ended; for a holder on another machine, return False."""
    token = _newest(run / LEASE)
    holder = _read(run / LEASE, token)
    if not token or holder.get("is_released"):
        return True
    if (holder.get("host"), holder.get("boot")) != (socket.gethostname(), _boot()):
        return False
    try:
        os.kill(int(holder.get("pid") or 0), 0)
    except PermissionError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return False


def beats_of(run: Path) -> tuple[int, Any]:
    """Return the newest token and its beats; while the holder lives, they change every `BEAT_S` seconds."""
    token = _newest(run / LEASE)
    return token, _read(run / LEASE, token).get("beats")


def _in_use(run: Path, holder: dict[str, Any]) -> RunFolderError:
    known = f" ({holder['pid']} on {holder['host']})" if "pid" in holder and "host" in holder else ""
    return RunFolderError(f"run folder {run} is in use by another process{known}: end it, or set --run")


def _create(folder: Path, token: int, run: str) -> None:
    descriptor = os.open(folder / _name(token), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, _content(run, 0, is_released=False))
        os.fsync(descriptor)
    except OSError:
        (folder / _name(token)).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _content(run: str, beats: int, *, is_released: bool) -> bytes:
    facts = {
        "host": socket.gethostname()[:64],
        "boot": _boot(),
        "pid": os.getpid(),
        "run": run,
        "beats": beats,
        "is_released": is_released,
    }
    return json.dumps(facts).encode().ljust(WIDTH - 1) + b"\n"


def _read(folder: Path, token: int) -> dict[str, Any]:
    """Read a token; empty if it is gone, or if its maker died before it wrote."""
    with suppress(OSError):
        return _facts((folder / _name(token)).read_bytes())
    return {}


def _facts(content: bytes) -> dict[str, Any]:
    """Parse the content of a token; empty if it is damaged."""
    try:
        facts = json.loads(content)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _newest(folder: Path) -> int:
    """Return the highest token; 0 if there is none."""
    with suppress(OSError):
        numbers = [each.name.removeprefix("token_") for each in folder.iterdir()]
        return max((int(number) for number in numbers if number.isdigit()), default=0)
    return 0


def _name(token: int) -> str:
    return f"token_{token:06d}"


def _boot() -> str:
    """Return an id of this machine's current start."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
