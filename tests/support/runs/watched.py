"""A run in this process that a test watches and steers while it goes on."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.board.board import Board
from deploy.board.embedded import BOARD_URL
from deploy.folder.run_folder import RunFolder, open_run_folder
from deploy.monitor.journal import RunJournal
from deploy.monitor.observe import Observed
from deploy.monitor.progress import Progress
from deploy.run.local import LocalFleet
from learner.loop.loop import Save, train
from protocol.commands import new_command
from protocol.config.run import RunConfig
from protocol.errors import NonFiniteError
from protocol.messages import Prompt
from protocol.ports import Fleet
from protocol.sink import StatusSink
from protocol.status import RunStatus
from tests.support.services.boards import answering
from tests.support.waiting import until

TRAIN = tuple(Prompt(index=index, text=text) for index, text in enumerate(("a red circle", "a blue square", "two")))
HELDOUT = (Prompt(index=0, text="one"),)
REDNESS = {"redness": {"scorer": "tests.support.rewards.judges:Redness"}}
"""Section `rewards` of a config for `go`."""


@dataclass
class Scene:
    """One run, and what a test may want of it."""

    config: RunConfig
    run: RunFolder
    observed: Observed
    stop: asyncio.Event

    async def ask(self, kind: str, **facts: Any) -> str:
        """Leave a command on the board; its id. Before the run's first contact it would be an earlier process's."""
        await until(self._is_connected)
        board = Board((self.run.path / BOARD_URL).read_text())
        command = new_command(kind, **facts)  # pyright: ignore[reportArgumentType]
        await answering(board)
        await board.send(self.observed.reporter.run, command)
        await board.close()
        return command.id

    def _is_connected(self) -> bool:
        conditions = self.observed.reporter.status().conditions
        return any(each.type == "BoardConnected" and each.status == "True" for each in conditions)

    async def outcome(self, command: str) -> tuple[str, str]:
        """State and message once it is no longer open."""
        held = self.observed.reporter.buffers.commands
        await until(lambda: settled(held, command))
        return held[command].state, held[command].message


async def comes_to(scene: Scene, iteration: int) -> bool:
    return scene.observed.reporter.status().iteration >= iteration


async def settled(held: dict, command: str) -> bool:
    return command in held and not held[command].is_open


def go(
    config: RunConfig,
    folder: Path,
    *,
    beside: Callable[[Scene], Awaitable[None]] | None = None,
    slow_s: float = 0.0,
    fails_at: int = 0,
    waits: bool = True,
    prompts: tuple[Sequence[Prompt], Sequence[Prompt]] = (TRAIN, HELDOUT),
    make_fleet: Callable[[RunConfig, StatusSink], Fleet] = lambda config, sink: LocalFleet(config),
) -> str:
    """One run in this process; `beside` goes on while it does. Returns the digest of the last weights.

    However fast its iterations are, the run does not begin its last one before `beside` has ended, unless `waits` is
    False; commands reach it meanwhile.
    """

    async def scenario() -> str:
        run = open_run_folder(folder, config)
        journal, stop = RunJournal(run, Progress()), asyncio.Event()
        fleet = make_fleet(config, journal)
        try:
            async with Observed(run, fleet, journal, stop) as observed:
                await fleet.start()
                observed.reporter.begin(0)
                scene = Scene(config, run, observed, stop)
                watching = asyncio.create_task(beside(scene)) if beside else None
                if watching:
                    watching.add_done_callback(lambda done: stop.set() if done.exception() else None)

                async def between(save: Save) -> None:
                    await asyncio.sleep(slow_s)
                    if fails_at and observed.reporter.status().iteration >= fails_at:
                        raise NonFiniteError("the loss must be finite, got NaN")
                    await observed.control.between(save)
                    while waits and watching and not watching.done() and not stop.is_set() and is_last():
                        await asyncio.sleep(0.01)
                        await observed.control.between(save)

                def is_last() -> bool:
                    return observed.reporter.status().iteration == config.iterations - 1

                await train(
                    config,
                    prompts=prompts[0],
                    heldout=prompts[1],
                    ports=fleet.ports,
                    journal=journal,
                    stop=stop,
                    between=between,
                    observer=observed,
                )
                if watching:
                    await watching
            return (await fleet.ports.learner.adapter()).digest
        finally:
            fleet.stop()
            run.close()

    return asyncio.run(asyncio.wait_for(scenario(), 240))


def left_behind(folder: Path) -> RunStatus:
    return RunStatus.model_validate(json.loads((folder / "status.json").read_text())["status"])
