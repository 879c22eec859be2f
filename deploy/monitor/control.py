"""Carries out commands to a run in progress: scale, pause, resume, checkpoint, stop; each command gets an outcome.

Commands come from the board. A desired size holds until a newer one replaces it; a condition says why it is not
reached. Desired sizes and a pause survive a crash but not a normal exit. A refused desired size is dropped.
Commands that were meant for an earlier process are not carried out.
"""

import asyncio
import time

from deploy.monitor.reporter import Reporter
from learner.loop.loop import Save
from learner.loop.stopping import unless_stopped
from protocol.commands import Command, new_command
from protocol.errors import PoolError
from protocol.ports import Fleet
from protocol.sink import StatusSink
from protocol.status import ENDED, PoolStatus, RunStatus

WAITING_S = 2.0
"""Seconds that a pool may take to reach its desired size before a condition reports it."""
STARTING_S = 30.0
"""The same while the run starts. Also seconds after which an actor without a process counts as waiting for a node: an
actor holds its resources before Ray has started its process, and the cluster then seems full."""


class Control:
    """Carries out a run's commands; the publisher passes them in, and the training loop awaits `between`.

    control = Control(fleet, reporter, sink, stop)
    control.take(command)
    await control.between(save)          # between two iterations
    """

    def __init__(self, fleet: Fleet, reporter: Reporter, sink: StatusSink, stop: asyncio.Event) -> None:
        """
        Args:
            reporter: shows commands, desired sizes and the pause.
        """
        self._fleet = fleet
        self._sink = sink
        self._reporter = reporter
        self._stop = stop
        self._changed = asyncio.Event()
        self._open: list[Command] = []
        self._early: list[Command] = []
        self._unmet_since: dict[str, float] = {}

    def take_over(self, earlier: RunStatus) -> None:
        """Keep the desired sizes and the pause of an earlier process of this run that crashed."""
        commands = [new_command("scale", pool=pool, count=count) for pool, count in earlier.desired_sizes.items()]
        commands += [new_command("pause")] if earlier.is_pause_requested else []
        if commands:
            self._early += commands
            self._reporter.desired_sizes = dict(earlier.desired_sizes)
            self._reporter.is_pause_requested = earlier.is_pause_requested
            words = ", ".join(map(_words, commands))
            self._sink.event(f"the previous process crashed; its commands still hold: {words}")

    def take(self, command: Command) -> None:
        """Begin to carry out a command; while the run starts, keep the command for `reconcile`."""
        if self._reporter.phase == "starting":
            self._early.append(command)
            return
        if self._reporter.phase in ENDED:
            self._close(command, "failed", "the run has ended")
            return
        if command.kind != "checkpoint":
            self._supersede(command)
        self._open.append(command)
        self._keep(command, "working")
        self._sink.event(f"command: {_words(command)}")
        if command.kind == "scale":
            self._scale(command)
        elif command.kind == "stop":
            self._stop.set()
            self._reporter.phase = "stopping"
        elif command.kind in ("pause", "resume"):
            self._reporter.is_pause_requested = command.kind == "pause"
        if command.kind == "resume":
            self._close_all("resume", "the run continues")
        self._changed.set()

    def refuse(self, command: Command) -> None:
        """Refuse a command that was meant for an earlier process of this run."""
        self._close(command, "failed", "it was meant for an earlier process of this run; send it again")

    async def between(self, save: Save) -> None:
        """Write a checkpoint if a command asks for one, and wait while the run is paused.

        A `resume` or a stop ends the wait.
        """
        await self._save_if_asked(save)
        if not self._reporter.is_pause_requested or self._stop.is_set():
            return
        self._reporter.phase = "paused"
        self._sink.event("paused")
        while self._reporter.is_pause_requested and not self._stop.is_set():
            self._close_all("pause", "paused between two iterations")
            self._changed.clear()
            await unless_stopped(self._stop, self._changed.wait())
            await self._save_if_asked(save)
        self._reporter.phase = "stopping" if self._stop.is_set() else "running"
        self._sink.event("resumed")

    async def reconcile(self) -> None:
        """Close scale commands whose size is reached and state why others are not.

        While the run starts, commands wait, and only pools whose actors cannot start are stated.
        """
        is_starting = self._reporter.phase == "starting"
        if not is_starting:
            early, self._early = self._early, []
            for command in early:
                self.take(command)
        for pool in self._fleet.pools():
            if pool.ready == pool.desired:
                self._unmet_since.pop(pool.name, None)
                self._close_all("scale", f"{pool.name} has {pool.ready} actors", pool=pool.name)
                self._state(pool, holds=True, reason="Settled", message=f"{pool.ready} actors, as desired")
                continue
            since = self._unmet_since.setdefault(pool.name, time.monotonic())
            waited_s = time.monotonic() - since
            if waited_s > (STARTING_S if is_starting else WAITING_S):
                why = await self._why(pool, waited_s)
                if not (is_starting and why["reason"] == "Starting"):
                    self._state(pool, holds=False, **why)

    def end(self, *, is_saved: bool) -> None:
        """Close all open commands at the end of the run.

        Args:
            is_saved: whether the newest iteration has its checkpoint. A stop is done in either case, a checkpoint only
                then, and every other command has failed.
        """
        without = "stopped; the same command repeats what no checkpoint holds"
        self._close_all("stop", "stopped with a checkpoint" if is_saved else without)
        if is_saved:
            self._close_all("checkpoint", "written at the end of the run")
        for command in (*self._open, *self._early):
            self._close(command, "failed", "the run ended before it was carried out")

    async def _why(self, pool: PoolStatus, waited_s: float) -> dict[str, str]:
        have = f"{pool.name} has {pool.ready} of {pool.desired} actors"
        if pool.held_for:
            return {"reason": "Yields", "message": f"{have}; {pool.held_for} has none and gets free room first"}
        if pool.trouble:
            return {"reason": "ActorsFail", "message": f"{have}; the next one failed: {pool.trouble}"}
        if pool.waiting and waited_s > STARTING_S:
            shortage = await asyncio.to_thread(self._fleet.shortage, pool.name)
            if shortage:
                message = f"{have}; {pool.waiting} wait for a node or a process: {shortage}"
                return {"reason": "Unschedulable", "message": message}
        reason = "Starting" if pool.ready < pool.desired else "Leaving"
        return {"reason": reason, "message": f"{have}; actors start, load their models or finish their calls"}

    def _state(self, pool: PoolStatus, *, holds: bool, reason: str, message: str) -> None:
        self._sink.condition(f"PoolSettled/{pool.name}", holds, reason, message)

    def _scale(self, command: Command) -> None:
        assert command.pool is not None
        assert command.count is not None
        try:
            self._fleet.scale(command.pool, command.count)
        except PoolError as error:
            if self._reporter.desired_sizes.get(command.pool) == command.count:  # it came from an earlier process
                del self._reporter.desired_sizes[command.pool]
            self._close(command, "failed", str(error))
        else:
            self._reporter.desired_sizes[command.pool] = command.count

    async def _save_if_asked(self, save: Save) -> None:
        if not any(command.kind == "checkpoint" for command in self._open):
            return
        if await save():
            self._close_all("checkpoint", "written")
        for command in [command for command in self._open if command.kind == "checkpoint"]:
            self._close(command, "failed", "it could not be written; the condition CheckpointsWritten says why")

    def _supersede(self, newer: Command) -> None:
        rivals = {"pause", "resume"} if newer.kind in ("pause", "resume") else {newer.kind}
        for command in [c for c in self._open if c.kind in rivals and c.pool == newer.pool]:
            self._close(command, "superseded", f"replaced by {_words(newer)}")

    def _close_all(self, kind: str, message: str, pool: str | None = None) -> None:
        for command in [c for c in self._open if c.kind == kind and (pool is None or c.pool == pool)]:
            self._close(command, "done", message)

    def _close(self, command: Command, state: str, message: str) -> None:
        self._open = [other for other in self._open if other.id != command.id]
        self._keep(command, state, message=message, finished=time.time())
        if state == "failed":
            self._sink.event(f"not done: {_words(command)}: {message}", "warning")

    def _keep(self, command: Command, state: str, **changes: object) -> None:
        self._reporter.buffers.commands[command.id] = command.model_copy(update={"state": state, **changes})


def _words(command: Command) -> str:
    return f"{command.pool} to {command.count} actors" if command.kind == "scale" else command.kind
