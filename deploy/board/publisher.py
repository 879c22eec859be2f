"""Brings a run's status to its board, in a task of its own: the run never waits for it and never fails with it.

While the board is away, bounded buffers keep what it should hold and write it when the board is back: the newest
`LINES_KEPT` metric lines, `EVENTS_KEPT` events, `RECORDS_KEPT` trajectory records and `COMMANDS_KEPT` outcomes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from deploy.board.board import COMMANDS_KEPT, EVENTS_KEPT, LINES_KEPT, RECORDS_KEPT, Board, FencedOutError, Held, Update
from deploy.board.lease import BoardLease
from protocol.commands import Command
from protocol.errors import BoardError
from protocol.status import Event, MetricLine, RunStatus, TrajectoryRecord

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 5.0
"""Between two tries to reach a board that is away; the pauses double up to this."""
LAST_WORDS_S = 5.0
"""Given to the last writing, at the end of the run."""


class Buffers:
    """What the board should hold of the run; written by the reporter, read by the publisher."""

    def __init__(self, lines: Sequence[MetricLine] = ()) -> None:
        self.lines = deque(lines, maxlen=LINES_KEPT)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.trajectories: dict[int, TrajectoryRecord] = {}
        self.commands: dict[str, Command] = {}

    def add_record(self, record: TrajectoryRecord) -> None:
        """Keep a record, and of all the newest `RECORDS_KEPT`."""
        self.trajectories[record.iteration] = record
        self.trajectories = dict(sorted(self.trajectories.items())[-RECORDS_KEPT:])


class Publisher:
    """Made once a run.

    publisher = Publisher(board, buffers, compose=reporter.status, on_command=control.take, keep_s=86400)
    task = asyncio.create_task(publisher.run())
    ...
    task.cancel()
    await publisher.last_words()
    """

    def __init__(
        self,
        board: Board,
        buffers: Buffers,
        *,
        compose: Callable[[], RunStatus],
        on_command: Callable[[Command], None],
        on_contact: Callable[[str], None],
        keep_s: float,
        lease: BoardLease | None = None,
    ) -> None:
        """With a lease nothing is written while another process holds it."""
        self._board = board
        self._buffers = buffers
        self._compose = compose
        self._on_command = on_command
        self._on_contact = on_contact
        self._keep_s = keep_s
        self._lease = lease
        self._held: Held | None = None
        self._written: dict[str, str] = {}
        self._seen: set[str] = set()

    async def run(self) -> None:
        """Write and read in the rhythm of the heartbeat, until cancelled."""
        pause_s = heartbeat_s = self._compose().heartbeat_s
        while True:
            try:
                await self._exchange()
                pause_s = heartbeat_s
                self._on_contact("")
            except BoardError as error:
                self._held = None
                pause_s = min(max(heartbeat_s, 2 * pause_s), max(LONGEST_PAUSE_S, heartbeat_s))
                self._on_contact(str(error))
            await asyncio.sleep(pause_s)

    async def last_words(self) -> None:
        """One more writing, so that the board shows how the run ended; given up when the board is away."""
        try:
            await asyncio.wait_for(self._exchange(), LAST_WORDS_S)
        except (BoardError, TimeoutError) as error:
            log.warning("the board does not know how the run ended: %s", error)
        await self._board.close()

    async def _exchange(self) -> None:
        status = self._compose()
        is_rewrite = False
        if self._held is None or self._held.session != status.session:
            held = await self._board.held(status.run)
            is_rewrite = held.session != status.session
            self._held = Held(status.session) if is_rewrite else held
            self._written = {}
        held, buffers = self._held, self._buffers
        update = Update(
            status,
            lines=[line for line in buffers.lines if line.seq > held.line],
            events=[event for event in buffers.events if event.number > held.event],
            trajectories=[
                record for iteration, record in buffers.trajectories.items() if iteration not in held.trajectories
            ],
            commands=[c for c in buffers.commands.values() if self._written.get(c.id) != c.state],
            is_rewrite=is_rewrite,
        )
        asked = await self._write(update)
        self._note(update, held)
        await self._forget_old()
        for command in asked:
            if command.id not in self._seen:
                self._seen.add(command.id)
                self._on_command(command)

    async def _write(self, update: Update) -> list[Command]:
        """Once more when the lease is not there, which is so when the board has been away and lost its memory."""
        if self._lease is None:
            return await self._board.write(update, keep_s=self._keep_s)
        try:
            return await self._board.write(update, keep_s=self._keep_s, fence=self._lease.fence)
        except FencedOutError:
            await asyncio.to_thread(self._lease.renew)
            return await self._board.write(update, keep_s=self._keep_s, fence=self._lease.fence)

    def _note(self, update: Update, held: Held) -> None:
        """The board has it."""
        if update.lines:
            held.line = update.lines[-1].seq
        if update.events:
            held.event = update.events[-1].number
        held.trajectories |= {record.iteration for record in update.trajectories}
        self._written |= {command.id: command.state for command in update.commands}

    async def _forget_old(self) -> None:
        done = [command.id for command in self._buffers.commands.values() if not command.is_open]
        old = done[:-COMMANDS_KEPT]
        if old:
            await self._board.forget_command(self._compose().run, old)
        for command in old:
            del self._buffers.commands[command]
