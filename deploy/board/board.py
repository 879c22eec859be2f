"""The status board on Redis or Valkey: status of runs, and commands to them. JSON only.

    flowcredit:runs                 sorted set: run, when it was last heard
    flowcredit:run:ID:status        `RunStatus`
    flowcredit:run:ID:heard         milliseconds for which it is kept; minus the time left, this is its age
    flowcredit:run:ID:session       the process that wrote these values
    flowcredit:run:ID:metrics       stream of `MetricLine`, newest `LINES_KEPT`; entry `SEQ-0`
    flowcredit:run:ID:events        stream of `Event`, newest `EVENTS_KEPT`; entry `NUMBER-0`
    flowcredit:run:ID:trajectories       hash: iteration, `TrajectoryRecord`
    flowcredit:run:ID:commands      hash: command id, `Command` with its outcome
    flowcredit:run:ID:queue         list: ids of commands that the run has not read
    flowcredit:run:ID:lease         who may write, see `deploy.board.lease`

Every key of a run expires some days after its last write. Values that are foreign, damaged or of a later version count
as missing; a run that finds such values writes its own again. The board carries status and commands, never training
data: without it a run cannot be watched or controlled, but it goes on training.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError, WatchError

from protocol.commands import Command
from protocol.errors import BoardError, ConfigError, DamagedError, one_line
from protocol.ground.addresses import check_address, without_password
from protocol.status import Document, Event, MetricLine, RunStatus, TrajectoryRecord

LINES_KEPT, EVENTS_KEPT, RECORDS_KEPT, COMMANDS_KEPT = 10_000, 1_000, 20, 100
RENEWALS = 3
"""Number of tries of one write: a lease that is renewed at the same moment cancels it."""
OPEN_COMMANDS = 50
"""Largest number of commands that may wait for a run."""
KINDS = {
    "status": "string",
    "heard": "string",
    "session": "string",
    "metrics": "stream",
    "events": "stream",
    "trajectories": "hash",
    "commands": "hash",
    "queue": "list",
}
"""Redis' type of each of a run's keys that `write` makes."""
PASSWORD = "it wants a password: write redis://:PASSWORD@HOST"
REMEDIES = {
    "used memory > 'maxmemory'": "its memory is full: raise its maxmemory or remove old runs",
    "CERTIFICATE_VERIFY_FAILED": "name the host as its certificate does, and the CA's file with ?ssl_ca_certs=FILE",
    "HELLO must be called": PASSWORD,  # redis-py 8
    "Authentication required": PASSWORD,  # redis-py 7
}
"""Remedies by a part of the client library's message."""
Parsed = TypeVar("Parsed", bound=Document)


@dataclass
class Update:
    """Everything that a run writes at one time."""

    status: RunStatus
    lines: Sequence[MetricLine] = ()
    events: Sequence[Event] = ()
    trajectories: Sequence[TrajectoryRecord] = ()
    commands: Sequence[Command] = ()
    is_rewrite: bool = False
    """Drop the streams and records of an earlier process of the run; open commands stay."""


@dataclass(frozen=True)
class Fence:
    """A condition on a write: `key` must hold `owner` when it happens."""

    key: str
    owner: str


class FencedOutError(BoardError):
    """The writer does not hold the lease that its write needs."""


class QueueFullError(BoardError):
    """`OPEN_COMMANDS` commands already wait for the run."""


@dataclass(frozen=True)
class Written:
    """The answer to a write."""

    asked: list[Command]
    """The commands that wait for the run."""
    is_whole: bool
    """False if the board did not hold this session's earlier writes: it lost them, or another client changed it."""


@dataclass
class NewestEntries:
    """The newest entries of a run's streams that the board holds."""

    session: str | None
    line: int = 0
    event: int = 0
    trajectories: set[int] = field(default_factory=set)


class Board:
    """A client of one board, for the run that writes to it or for readers; it belongs to one event loop.

    board = Board("unix:///tmp/board.sock")
    asked = await board.write(Update(status), keep_s=86400)
    """

    def __init__(self, url: str, *, prefix: str = "flowcredit:", timeout_s: float = 2.0) -> None:
        self.url = url
        self._prefix = prefix
        foreign = "surrogateescape"  # foreign bytes are kept, and can be written back unchanged
        retry = Retry(NoBackoff(), 0)
        self._redis = client_of(Redis, url, timeout_s=timeout_s, retry=retry, encoding_errors=foreign)
        for authority in parse_qs(url.partition("?")[2]).get("ssl_ca_certs", ()):
            if not Path(authority).is_file():
                raise ConfigError(f"ssl_ca_certs in the board's address must be the CA's file, got {authority}")

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        """Raise BoardError if it does not answer."""
        with _answering(self.url):
            await self._redis.ping()

    async def newest(self, run: str) -> NewestEntries:
        """Return the newest entries of a run's streams."""
        with _answering(self.url):
            pipe = self._redis.pipeline(transaction=True)
            pipe.get(self._key(run, "session"))
            pipe.xrevrange(self._key(run, "metrics"), count=1)
            pipe.xrevrange(self._key(run, "events"), count=1)
            pipe.hkeys(self._key(run, "trajectories"))
            session, lines, events, trajectories = await pipe.execute()
        numbers = {int(name) for name in trajectories if name.isascii() and name.isdigit()}
        return NewestEntries(session, _top(lines), _top(events), numbers)

    async def remove_foreign(self, run: str, *, fence: Fence | None = None) -> None:
        """Remove keys of the run whose type `write` does not give (FencedOutError: as in `write`)."""
        kinds = {self._key(run, part): kind for part, kind in KINDS.items()} | {self._prefix + "runs": "zset"}
        with _answering(self.url):
            pipe = self._redis.pipeline(transaction=False)
            for key in kinds:
                pipe.type(key)
            found = await pipe.execute()
            if wrong := [key for (key, kind), held in zip(kinds.items(), found, strict=True) if held != kind]:
                await self._transact(lambda pipe: pipe.delete(*wrong), fence)

    async def prune(self) -> None:
        """Drop the names of runs whose documents have expired."""
        with _answering(self.url):
            names = await self._redis.zrange(self._prefix + "runs", 0, -1)
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.exists(self._key(name, "status"))
            gone = [name for name, is_there in zip(names, await pipe.execute(), strict=True) if not is_there]
            if gone:
                await self._redis.zrem(self._prefix + "runs", *gone)

    async def write(self, update: Update, *, keep_s: float, fence: Fence | None = None) -> Written:
        """Write everything or nothing; writing the same twice does no harm.

        Args:
            keep_s: seconds after which the run's keys expire.
            fence: nothing is written unless it holds.

        Returns:
            The commands that wait for the run, and whether the board held the earlier writes.

        Raises:
            FencedOutError: the fence does not hold; nothing is written.
            DamagedError: the board holds values of another type; `remove_foreign` removes them.
            BoardError: the board does not answer.
        """
        run, is_whole = update.status.run, True
        with _answering(self.url):
            answers = await self._transact(partial(self._add, update=update, keep=int(keep_s)), fence)
            for answer in answers:
                if isinstance(answer, ResponseError) and "equal or smaller" in str(answer):
                    is_whole = False  # an earlier write arrived but not its answer, or the entry is foreign
                elif isinstance(answer, Exception):
                    raise answer
            session, *_, lines, _, records, _, waiting = answers
            expected = {str(iteration) for iteration in update.status.trajectories[-RECORDS_KEPT:]}
            is_whole = is_whole and (lines > 0 or update.status.lines == 0) and expected <= set(records)
            held = await self._redis.hmget(self._key(run, "commands"), waiting) if waiting else []
            asked = [
                command
                for name, text in zip(waiting, held, strict=True)
                if (command := _parsed(Command, text)) and command.id == name
            ]
            for foreign in set(waiting) - {command.id for command in asked}:
                await self._redis.lrem(self._key(run, "queue"), 0, foreign)
        return Written(asked, is_whole and (update.is_rewrite or session == update.status.session))

    async def forget_command(self, run: str, ids: Sequence[str]) -> None:
        """Drop the outcomes of old commands."""
        with _answering(self.url):
            await self._redis.hdel(self._key(run, "commands"), *ids)

    async def runs(self) -> list[RunStatus]:
        with _answering(self.url):
            names = await self._redis.zrevrange(self._prefix + "runs", 0, 999)
            found = await self._statuses(names)
        statuses = []
        for run, answers in zip(names, found, strict=True):
            with suppress(DamagedError):  # each run fails alone; `status` raises the reason
                if status := self._status(run, *answers):
                    statuses.append(status)
        return statuses

    async def status(self, run: str) -> RunStatus | None:
        """Return one run (DamagedError: its status cannot be read)."""
        with _answering(self.url):
            (answers,) = await self._statuses([run])
        return self._status(run, *answers)

    async def _statuses(self, runs: Sequence[str]) -> list[tuple[Any, Any, Any]]:
        """Return for each run the text of its status, how long it is kept, and the time left; any may be an error."""
        pipe = self._redis.pipeline(transaction=False)
        for run in runs:
            pipe.get(self._key(run, "status"))
            pipe.get(self._key(run, "heard"))
            pipe.pttl(self._key(run, "heard"))
        answers = iter(await pipe.execute(raise_on_error=False))
        return list(zip(answers, answers, answers, strict=True))

    def _status(self, run: str, text: Any, kept_ms: Any, left_ms: Any) -> RunStatus | None:
        if text is None:
            return None
        try:
            if isinstance(text, Exception):
                raise text
            status = RunStatus.read(text)
            if status.run != run:
                raise ValueError(f"it is of run {status.run!r}")
        except (RedisError, ValueError, RecursionError) as error:
            problem: Mapping[str, Any] = {"loc": (), "msg": one_line(error)}
            if isinstance(error, ValidationError):
                problem = error.errors()[0]
            where = "".join(f"{part}: " for part in problem["loc"] if part != "schema_version")
            reason = where + problem["msg"].removeprefix("Value error, ")
            raise DamagedError(f"the status of run {run} on the board cannot be read: {one_line(reason)}") from None
        is_known = isinstance(kept_ms, str) and re.fullmatch(r"[0-9]{1,15}", kept_ms) and left_ms >= 0
        return status.model_copy(update={"silent_s": max(0, int(kept_ms) - left_ms) / 1000 if is_known else None})

    async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
        return await self._stream(run, "metrics", MetricLine, since=since, limit=limit)

    async def events(self, run: str, *, since: int, limit: int) -> list[Event]:
        return await self._stream(run, "events", Event, since=since, limit=limit)

    async def folder(self, run: str) -> Path | None:  # noqa: ARG002
        """Return None: a board holds statuses, not files."""
        return None

    async def record(self, run: str, iteration: int) -> TrajectoryRecord | None:
        with _answering(self.url):
            return _parsed(TrajectoryRecord, await self._redis.hget(self._key(run, "trajectories"), str(iteration)))

    async def command(self, run: str, command: str) -> Command | None:
        with _answering(self.url):
            return _parsed(Command, await self._redis.hget(self._key(run, "commands"), command))

    async def send(self, run: str, command: Command) -> None:
        """Put a command into the run's queue (QueueFullError: too many already wait)."""
        with _answering(self.url):
            if await self._redis.llen(self._key(run, "queue")) >= OPEN_COMMANDS:
                raise QueueFullError(
                    f"at most {OPEN_COMMANDS} commands may wait for a run: wait until it has read them"
                )
            pipe = self._redis.pipeline(transaction=True)
            pipe.hset(self._key(run, "commands"), command.id, command.model_dump_json())
            pipe.rpush(self._key(run, "queue"), command.id)
            await pipe.execute()

    async def _stream(self, run: str, part: str, kind: type[Parsed], *, since: int, limit: int) -> list[Parsed]:
        with _answering(self.url):
            entries = await self._redis.xrange(self._key(run, part), min=f"{since + 1}-0", max="+", count=limit)
        return [document for _, entry in entries if (document := _parsed(kind, entry.get("json")))]

    async def _transact(self, add: Callable[[Any], None], fence: Fence | None) -> list[Any]:
        """Run the commands that `add` puts into a transaction; return their answers, with errors among them."""
        for _ in range(RENEWALS):
            async with self._redis.pipeline(transaction=True) as pipe:
                if fence:
                    await pipe.watch(fence.key)
                    if await pipe.get(fence.key) != fence.owner:
                        break
                    pipe.multi()
                add(pipe)
                with suppress(WatchError):  # the lease was renewed or lost in between
                    return await pipe.execute(raise_on_error=False)
        raise FencedOutError("this process does not hold the run's lease on the board")

    def _add(self, pipe: Any, *, update: Update, keep: int) -> None:
        """Add all commands of a write; the first one and the last five read what the board holds."""
        status, run = update.status, update.status.run
        pipe.get(self._key(run, "session"))
        if update.is_rewrite:
            pipe.delete(*(self._key(run, part) for part in ("metrics", "events", "trajectories")))
        self._add_streams(pipe, run, update)
        oldest = [str(iteration) for iteration in status.trajectories[:-RECORDS_KEPT]]
        if oldest:
            pipe.hdel(self._key(run, "trajectories"), *oldest)
        for command in update.commands:
            pipe.hset(self._key(run, "commands"), command.id, command.model_dump_json())
            if not command.is_open:
                pipe.lrem(self._key(run, "queue"), 0, command.id)
        pipe.set(self._key(run, "status"), status.model_dump_json())
        pipe.set(self._key(run, "session"), status.session)
        pipe.zadd(self._prefix + "runs", {run: status.updated})
        pipe.set(self._key(run, "heard"), str(keep * 1000), px=keep * 1000)
        for part in KINDS.keys() - {"heard"}:
            pipe.expire(self._key(run, part), keep)
        pipe.xlen(self._key(run, "metrics"))
        pipe.xlen(self._key(run, "events"))
        pipe.hkeys(self._key(run, "trajectories"))
        pipe.hlen(self._key(run, "commands"))
        pipe.lrange(self._key(run, "queue"), 0, -1)

    def _add_streams(self, pipe: Any, run: str, update: Update) -> None:
        for line in update.lines:
            entry = {"json": line.model_dump_json()}
            pipe.xadd(self._key(run, "metrics"), entry, id=f"{line.seq}-0", maxlen=LINES_KEPT, approximate=True)
        for event in update.events:
            entry = {"json": event.model_dump_json()}
            pipe.xadd(self._key(run, "events"), entry, id=f"{event.number}-0", maxlen=EVENTS_KEPT, approximate=True)
        for record in update.trajectories:
            pipe.hset(self._key(run, "trajectories"), str(record.iteration), record.model_dump_json())

    def _key(self, run: str, part: str) -> str:
        return f"{self._prefix}run:{run}:{part}"


def client_of(kind: Any, url: str, *, timeout_s: float, **options: Any) -> Any:
    """Make a client of a board.

    Args:
        kind: the client library's class, for coroutines or for threads.

    Raises:
        ConfigError: no client can use this address.
    """
    check_address(url)
    try:
        client = kind.from_url(
            url, decode_responses=True, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **options
        )
        client.connection_pool.make_connection()
    except (ValueError, TypeError, RedisError) as error:
        reason = str(error).rpartition("__init__() ")[2]
        raise ConfigError(f"the board's address {without_password(url)} is not usable: {reason}") from None
    return client


@contextmanager
def _answering(url: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        reason = one_line(error).rstrip(".")
        if "WRONGTYPE" in reason:
            raise DamagedError(
                f"the board at {without_password(url)} holds a value of another type: {reason}"
            ) from error
        remedy = next((f"; {remedy}" for sign, remedy in REMEDIES.items() if sign in reason), "")
        raise BoardError(f"the board at {without_password(url)} does not answer: {reason}{remedy}") from error


def _top(entries: Sequence[tuple[str, Any]]) -> int:
    return int(entries[0][0].partition("-")[0]) if entries else 0


def _parsed(kind: type[Parsed], text: str | None) -> Parsed | None:
    """Parse a document; None if it is missing or in the form of a later version."""
    if text is None:
        return None
    try:
        return kind.read(text)
    except (ValueError, RecursionError):
        return None
