"""The lease on a shared board: one process at a time may train under a run's name and write its copies.

    flowcredit:run:ID:lease             the holder of the name: host, process, a random id; lives `TTL_S`, renewed
                                        every `renew_s`
    flowcredit:copies:SHA256:lease      the holder of a `checkpoint.url`, if the config has one
    ….:lease:token                      grows by one whenever the lease changes hands

The lease of the run folder (`deploy.folder.lease`) separates processes that share a disk. This one separates processes
that share a board. If the board does not answer, the run goes on under the folder's lease alone and takes this one when
the board is back; on a board that has lost it the token counts on from the process's own. A process that was silent for
longer than `TTL_S` finds another owner or, if that owner has ended, a token above its own. Either way it must not write
any more.
"""

import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from deploy.board.board import Fence, client_of
from protocol.config.run import RunConfig
from protocol.config.status import board_address
from protocol.errors import ConfigError, LeaseLostError, RunFolderError, one_line
from protocol.ground.addresses import EMBEDDED, OFF, without_password
from protocol.status import run_id_of

log = logging.getLogger(__name__)
TTL_S, POLL_S = 30.0, 1.0
TIMEOUT_S = 2.0
"""Seconds for one request to the board, and for the wait until a request may be made."""

CLAIM = """
local owner, folder, ttl, keep, words = ARGV[1], ARGV[2], ARGV[3], ARGV[4], 4
local function text(key)
    if redis.call('TYPE', key).ok ~= 'string' then redis.call('DEL', key) end
    return redis.call('GET', key)
end
for i, key in ipairs(KEYS) do
    local holder, newest = text(key), tonumber(text(key .. ':token') or '0') or 0
    local is_whole, facts = pcall(cjson.decode, holder or '{}')
    if holder and not (is_whole and type(facts) == 'table' and facts.folder) then
        redis.call('DEL', key)
        holder = false
    end
    if holder and holder ~= owner and facts.folder ~= folder then
        return {'theirs', i, holder, redis.call('PTTL', key)}
    end
    local ours = tonumber(ARGV[words + i])
    if holder ~= owner and ours > 0 and newest > ours then
        return {'theirs', i, holder or '{}', 0}
    end
end
local tokens = {'ours'}
for i, key in ipairs(KEYS) do
    local ours = tonumber(ARGV[words + i])
    if redis.call('GET', key) ~= owner then
        if (tonumber(redis.call('GET', key .. ':token') or '0') or 0) <= ours then
            redis.call('SET', key .. ':token', ours)
        end
        ours = redis.call('INCR', key .. ':token')
    end
    redis.call('SET', key, owner, 'PX', ttl)
    redis.call('EXPIRE', key .. ':token', keep)
    tokens[i + 1] = ours
end
return tokens
"""
"""Takes all leases or none. A lease is free if nobody holds it, or if its holder was an earlier process of the same run
folder: the folder's lease shows that it has ended. A lease that this process held and that changed hands since is not
taken again. A board that lost its data goes on counting from the token of the first process that comes back. A value
that is not a lease is dropped."""
RELEASE = "for _, k in ipairs(KEYS) do if redis.call('GET', k) == ARGV[1] then redis.call('DEL', k) end end return 1"


@dataclass(frozen=True)
class Claim:
    """The result of one request to the board."""

    tokens: tuple[int, ...] = ()
    """The token of each lease, if this process holds them."""
    what: str = ""
    """Otherwise the name or the URL that another process holds, or has held since."""
    holder: Mapping[str, Any] | None = None
    left_ms: int = 0


class FolderLease(Protocol):
    """The lease of a run folder, held."""

    @property
    def identity(self) -> str:
        """The folder's identity: the same for all its holders, but different for a copy of the folder."""
        ...

    def require(self) -> None:
        """Raise LeaseLostError if another process has taken over."""
        ...


class BoardLease:
    """Held from `take` to `release`, by a thread that renews it.

    lease = BoardLease(url, run="mine", copies=config.checkpoint.url, under=folder_lease, keep_s=86400).take()
    lease.require()                  # before each write
    lease.trouble                    # "" or why the board's lease is not held
    lease.release()
    """

    renew_s = 5.0
    """Seconds between two renewals."""

    def __init__(self, url: str, *, run: str, copies: str = "", under: FolderLease, keep_s: float) -> None:
        """Prepare the request.

        Args:
            copies: `checkpoint.url`; empty without one.
            under: the lease of the run folder; a process that loses it claims nothing here.
            keep_s: seconds for which the board keeps the tokens.

        Raises:
            ConfigError: no client can use this address.
        """
        self._url = url
        self._names = {f"flowcredit:run:{run}:lease": f"run {run!r}"}
        if copies:
            digest = hashlib.sha256(copies.encode()).hexdigest()
            self._names[f"flowcredit:copies:{digest}:lease"] = f"checkpoint.url {copies}"
        facts = {
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "folder": under.identity,
            "id": uuid.uuid4().hex,
        }
        self.fence = Fence(key=next(iter(self._names)), owner=json.dumps(facts))
        self._under, self._folder, self._keep_s = under, under.identity, keep_s
        self._redis = client_of(Redis, url, timeout_s=TIMEOUT_S, retry=Retry(NoBackoff(), 0))
        self.tokens = (0,) * len(self._names)
        self.trouble = "not asked for yet"
        self._lost = ""
        self._confirmed = time.monotonic()
        self._asking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_on, name="board lease", daemon=True)

    def take(self, say: Callable[[str], None] = log.warning) -> "BoardLease":
        """Take the lease; wait up to `TTL_S` seconds for a sign of life of another holder.

        If the board does not answer, this returns, and the request is repeated every `renew_s` seconds.

        Raises:
            RunFolderError: another process holds it.
        """
        try:
            self._wait_until_free(say)
        except BaseException:
            self._redis.close()
            raise
        self._thread.start()
        return self

    def require(self) -> None:
        if not self._lost and not self.trouble and time.monotonic() - self._confirmed > TTL_S:
            self.renew()
        if self._lost:
            raise LeaseLostError(self._lost)

    def renew(self) -> None:
        """Ask the board now: renew the lease, take it if it is free, or learn that another process holds it.

        Returns without asking if another thread has been asking for `TIMEOUT_S` seconds.
        """
        with self._only_one() as is_mine:
            if not is_mine or self._lost or self._ended.is_set():
                return
            try:
                self._under.require()
            except LeaseLostError as error:
                self.trouble = self._lost = str(error)
            else:
                self._note(self._claim())

    def release(self) -> None:
        """Give the lease up, so that another process can take it at once."""
        self._ended.set()
        self._thread.join(timeout=2 * TIMEOUT_S)
        with self._only_one() as is_mine:
            if not is_mine:
                return
            try:
                self._redis.eval(RELEASE, len(self._names), *self._names, self.fence.owner)
            except (RedisError, OSError) as error:
                log.warning("the board's lease runs out by itself within %g s: %s", TTL_S, one_line(error))
            self._redis.close()

    @contextmanager
    def _only_one(self) -> Iterator[bool]:
        """Yield whether this thread may ask; false if another one has been asking for `TIMEOUT_S` seconds."""
        is_mine = self._asking.acquire(timeout=TIMEOUT_S)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._asking.release()

    def _renew_on(self) -> None:
        while not self._ended.wait(self.renew_s):
            self.renew()

    def _wait_until_free(self, say: Callable[[str], None]) -> None:
        """Return when this process holds the lease, or when the board does not answer."""
        deadline = time.monotonic() + TTL_S + 2 * POLL_S
        before: Claim | None = None
        while (claim := self._claim()) is not None and claim.holder is not None:
            is_alive = before is not None and (claim.holder != before.holder or claim.left_ms > before.left_ms)
            if is_alive or time.monotonic() > deadline:
                raise RunFolderError(
                    f"{claim.what} is in use by {_who(claim.holder)}, says the board at"
                    f" {without_password(self._url)}: end it, or set --run and checkpoint.url to others"
                )
            if before is None:
                say(f"{claim.what} was last held by {_who(claim.holder)}; waiting up to {TTL_S:g} s for a sign of life")
            before = claim
            time.sleep(POLL_S)
        self._note(claim)

    def _claim(self) -> Claim | None:
        """Ask the board for all leases; None if it does not answer."""
        asked = time.monotonic()
        words = (self.fence.owner, self._folder, int(TTL_S * 1000), int(self._keep_s), *self.tokens)
        try:
            kind, *rest = self._redis.eval(CLAIM, len(self._names), *self._names, *words)
        except (RedisError, OSError, ValueError) as error:
            self.trouble = f"the board at {without_password(self._url)} does not answer: {one_line(error)}"
            return None
        if kind == "ours":
            self._confirmed = asked
            return Claim(tokens=tuple(rest))
        index, holder, left_ms = rest
        facts = json.loads(holder)
        what = list(self._names.values())[index - 1]
        return Claim(what=what, holder=facts if isinstance(facts, dict) else {}, left_ms=left_ms)

    def _note(self, claim: Claim | None) -> None:
        if claim is None:
            return
        if claim.holder is None:
            self.tokens, self.trouble = claim.tokens, ""
            return
        self.trouble = self._lost = (
            f"{claim.what} was taken over by {_who(claim.holder)}, says the board at {without_password(self._url)}:"
            " this one was silent too long and must not write any more"
        )


def lease_on_board(config: RunConfig, run: Path, under: FolderLease, say: Callable[[str], None]) -> BoardLease | None:
    """Take the lease of this run on its shared board; None without a shared board.

    An embedded board needs no lease: it is reached only through the run folder, which has a lease itself.

    Args:
        config: names the board and `checkpoint.url`.
        run: the run folder; its name is the run's name on the board.

    Raises:
        RunFolderError: another process holds it.
    """
    address = board_address(config.status)
    if address in (EMBEDDED, OFF):
        return None
    name = run_id_of(run.resolve().name)
    keep_s = config.status.keep_days * 86400
    try:
        lease = BoardLease(address, run=name, copies=config.checkpoint.url or "", under=under, keep_s=keep_s)
        return lease.take(say)
    except ConfigError as error:
        log.warning("no lease on the board: %s", error)
    return None


def _who(holder: Mapping[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
