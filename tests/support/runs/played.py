"""A run that a test plays: it stands on a board, beats and carries out every command, and trains nothing."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.board.board import Board
from deploy.board.embedded import BoardServer
from deploy.board.publisher import Buffers, Publisher
from learner.loop.stopping import end_all
from protocol.commands import Command
from tests.support.runs.statuses import a_status


@contextmanager
def played_run(folder: Path, name: str, **facts: Any) -> Iterator[tuple[str, threading.Event]]:
    """The address of a board in `folder` with the run, and an event that makes it fall silent; `facts` are fields of
    its status."""
    server = BoardServer(folder)
    server.start()
    ending, shown = threading.Event(), threading.Event()

    async def live() -> None:
        buffers = Buffers()

        def carry_out(command: Command) -> None:
            done = {"state": "done", "message": "as asked", "finished": time.time()}
            buffers.commands[command.id] = command.model_copy(update=done)

        publisher = Publisher(
            Board(server.url),
            buffers,
            compose=lambda: a_status(name, heartbeat_s=0.2, lines=0, **facts),
            on_command=carry_out,
            on_leftover=carry_out,
            on_contact=lambda trouble: None if trouble else shown.set(),
            keep_s=3600,
        )
        task = asyncio.create_task(publisher.run())
        while not ending.is_set():  # noqa: ASYNC110  another thread sets it
            await asyncio.sleep(0.1)
        await end_all([task])

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert shown.wait(60), "the run does not reach its board"
        yield server.url, ending
    finally:
        ending.set()
        thread.join()
        server.stop()
