"""Publishes a run's status on its board, in a separate task: the run never waits for it or fails with it.

While the board does not answer, bounded buffers keep the newest `LINES_BUFFERED` metric lines, `EVENTS_KEPT` events,
`RECORDS_KEPT` trajectory records and `COMMANDS_KEPT` outcomes; they are written when it answers again. Earlier lines
are read from the run folder.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from deploy.board.board import (
    COMMANDS_KEPT,
    EVENTS_KEPT,
    LINES_KEPT,
    RECORDS_KEPT,
    Board,
    FencedOutError,
    NewestEntries,
    Update,
    Written,
)
from deploy.board.lease import BoardLease
from protocol.commands import Command
from protocol.errors import BoardError, DamagedError
from protocol.status import Event, MetricLine, RunStatus, TrajectoryRecord

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 5.0
"""Longest pause between two tries to reach the board; the pauses double up to this."""
LINES_BUFFERED = 100
"""Newest metric lines in memory. The board keeps `LINES_KEPT`; each takes some KiB as a Python object."""
FINISH_S = 5.0
"""Seconds that the last write may take, at the end of the run."""


class Buffers:
    """Everything that the board should hold about the run; written by the reporter, read by the publisher."""

    def __init__(self, earlier: Callable[[int, int], Sequence[MetricLine]] = lambda *_: ()) -> None:
        """
        Args:
            earlier: reads metric lines that are no longer in memory. It takes a number and a limit, and returns at most
                so many lines after the number, oldest first.
        """
        self._earlier = earlier
        self.lines: deque[MetricLine] = deque(maxlen=LINES_BUFFERED)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.trajectories: dict[int, TrajectoryRecord] = {}
        self.commands: dict[str, Command] = {}

    async def lines_after(self, seq: int) -> list[MetricLine]:
        """Return the metric lines after this number, oldest first, at most the newest `LINES_KEPT`."""
        newest = [line for line in self.lines if line.seq > seq]
        if not newest or newest[0].seq == seq + 1:
            return newest
        limit = min(newest[0].seq - 1 - seq, LINES_KEPT - len(newest))
        return [*await asyncio.to_thread(self._earlier, newest[0].seq - 1 - limit, limit), *newest]

    def add_record(self, record: TrajectoryRecord) -> None:
        """Add a record; only the newest `RECORDS_KEPT` are kept."""
        self.trajectories[record.iteration] = record
        self.trajectories = dict(sorted(self.trajectories.items())[-RECORDS_KEPT:])


class Publisher:
    """Writes the buffers to the board and hands over commands. A run has one.

    publisher = Publisher(board, buffers, compose=reporter.status, on_command=control.take, ..., keep_s=86400)
    task = asyncio.create_task(publisher.run())
    ...
    task.cancel()
    await publisher.finish()
    """

    def __init__(
        self,
        board: Board,
        buffers: Buffers,
        *,
        compose: Callable[[], RunStatus],
        on_command: Callable[[Command], None],
        on_leftover: Callable[[Command], None],
        on_contact: Callable[[str], None],
        keep_s: float,
        lease: BoardLease | None = None,
    ) -> None:
        """
        Args:
            buffers: the run's lines, events, records and outcomes.
            on_command: is called once with each command to this process.
            on_leftover: is called once with each command that the board held before this process first wrote to it, so
                it was meant for an earlier process of the run. No clocks are compared.
            on_contact: is called after each exchange, with "" or the reason why the board does not answer.
            keep_s: seconds after the last write when the board drops the run.
            lease: nothing is written while another process holds it.
        """
        self._board = board
        self._buffers = buffers
        self._compose = compose
        self._on_command = on_command
        self._on_leftover = on_leftover
        self._has_written = False
        self._is_damaged = False
        self._is_lost = False
        self._on_contact = on_contact
        self._keep_s = keep_s
        self._lease = lease
        self._on_board: NewestEntries | None = None
        self._written: dict[str, str] = {}
        self._seen: set[str] = set()

    async def run(self) -> None:
        """Write and read once per heartbeat, until cancelled."""
        every_s = self._compose().heartbeat_s
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(BoardError),
            wait=wait_exponential(multiplier=2 * every_s, max=max(LONGEST_PAUSE_S, every_s)),
            before_sleep=self._note_failure,
        )
        while True:
            await retrying(self._exchange)
            self._on_contact("")
            await asyncio.sleep(every_s)

    async def finish(self) -> None:
        """Write once more, so that the board shows how the run ended; a board that does not answer is given up."""
        try:
            async with asyncio.timeout(FINISH_S):
                await self._exchange()
                if any(self._written.get(c.id) != c.state for c in self._buffers.commands.values()):
                    await self._exchange()  # a command came too late and was refused
        except (BoardError, TimeoutError) as error:
            log.warning("the board does not know how the run ended: %s", error)
        await self._board.close()

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._on_board = None
        self._is_damaged = isinstance(error, DamagedError)
        self._on_contact(f"{error}; it is written again" if self._is_damaged else str(error))

    async def _exchange(self) -> None:
        status = self._compose()
        is_rewrite = False
        fence, buffers = self._lease.fence if self._lease else None, self._buffers
        if self._is_damaged:
            await self._board.remove_foreign(status.run, fence=fence)
            self._is_damaged, self._is_lost = False, True
        if not self._has_written:
            await self._board.prune()
        if self._on_board is None:
            newest = await self._board.newest(status.run)
            is_ahead = newest.line > _last(buffers.lines, "seq") or newest.event > _last(buffers.events, "number")
            is_rewrite = self._is_lost or is_ahead or newest.session != status.session
            self._on_board = NewestEntries(status.session) if is_rewrite else newest
            self._written = {}
        on_board = self._on_board
        update = Update(
            status,
            lines=await buffers.lines_after(on_board.line),
            events=[event for event in buffers.events if event.number > on_board.event],
            trajectories=[
                record for iteration, record in buffers.trajectories.items() if iteration not in on_board.trajectories
            ],
            commands=[c for c in buffers.commands.values() if self._written.get(c.id) != c.state],
            is_rewrite=is_rewrite,
        )
        written = await self._write(update)
        self._note(update, on_board)
        self._is_lost = not written.is_whole
        if self._is_lost:
            self._on_board = None  # everything is written again with the next heartbeat
        await self._forget_old()
        hand_over = self._on_command if self._has_written else self._on_leftover
        self._has_written = True
        for command in written.asked:
            if command.id not in self._seen:
                self._seen.add(command.id)
                hand_over(command)

    async def _write(self, update: Update) -> Written:
        """Write; if the lease is missing, for instance on a board that lost its data, renew it and write again."""
        if self._lease is None:
            return await self._board.write(update, keep_s=self._keep_s)
        try:
            return await self._board.write(update, keep_s=self._keep_s, fence=self._lease.fence)
        except FencedOutError:
            await asyncio.to_thread(self._lease.renew)
            return await self._board.write(update, keep_s=self._keep_s, fence=self._lease.fence)

    def _note(self, update: Update, on_board: NewestEntries) -> None:
        """Note that the board holds this update."""
        if update.lines:
            on_board.line = update.lines[-1].seq
        if update.events:
            on_board.event = update.events[-1].number
        on_board.trajectories |= {record.iteration for record in update.trajectories}
        self._written |= {command.id: command.state for command in update.commands}

    async def _forget_old(self) -> None:
        done = [command.id for command in self._buffers.commands.values() if not command.is_open]
        old = done[:-COMMANDS_KEPT]
        if old:
            await self._board.forget_command(self._compose().run, old)
        for command in old:
            del self._buffers.commands[command]


def _last(entries: Sequence[MetricLine] | Sequence[Event], number: str) -> int:
    return getattr(entries[-1], number) if entries else 0
