"""The commands that serve and show runs and send them commands.

RUN is a run folder, or the name of a run in `runs/`; with FLOWCREDIT_BOARD or --board it is a run's name on that board.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.options import AllowHost, Host, IsJson, Port, Proxy, TokenFile
from deploy.folder.location import found_run, is_folder_of_runs, runs_folder
from protocol.errors import BoardError, InputError, RunFolderError
from protocol.ground.addresses import BOARD_VARIABLE

if TYPE_CHECKING:
    from protocol.commands import CommandKind

OUTCOME_S = 5.0
"""Seconds to wait for the outcome of a command."""
RunArgument = Annotated[str, typer.Argument(help="A run folder, or the name of a run in runs/ or on the board.")]
BoardOption = Annotated[
    str | None, typer.Option("--board", envvar=BOARD_VARIABLE, help="Address of a board; default: the run's own.")
]


def serve(
    where: Annotated[
        str | None,
        typer.Argument(
            help="A folder of runs, a run folder, or a board's address; default: runs/. A board has no configs, images,"
            " scores by prompt or reports."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8400,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    proxy: Proxy = None,
    descriptor: Annotated[int | None, typer.Option("--socket", hidden=True, help="A listening socket to use.")] = None,
    linger: Annotated[
        float, typer.Option(hidden=True, help="Seconds to go on after SIGTERM while a page is open.")
    ] = 0.0,
) -> None:
    """Serve the page and the status API of live and ended runs.

    A browser that shows the page asks no other server, and this one once a second (every 5 s for an ended or silent
    run), not while the tab is hidden; any number of tabs may be open.
    """
    from deploy.api.app import make_app
    from deploy.api.auth import TOKEN_VARIABLE, Access, read_token
    from deploy.api.serve import listen, serve_until_interrupted
    from deploy.api.source import open_source

    token = read_token(token_file)
    access = Access(host=host, token=token, allowed_hosts=tuple(allow_host or ()))
    app = make_app(open_source(where or os.environ.get(BOARD_VARIABLE) or str(runs_folder())), access)
    listener, address = listen(host, port, descriptor=descriptor)
    announcement = f"page      {address}/"
    if token is None:
        announcement += f"\n          read only: commands need a token, {TOKEN_VARIABLE} or --token-file"
    serve_until_interrupted(app, listener, announcement=announcement, proxies=proxy or (), grace_s=2, linger_s=linger)


def status(
    run: Annotated[
        str | None, typer.Argument(help="A run folder or a run's name; default, or a folder of runs: list them.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    board: BoardOption = None,
    is_json: IsJson = False,
) -> None:
    """Show the status of a run, or of all runs."""
    from rich.console import Console
    from rich.live import Live

    from deploy.cli.tables import show_run, show_runs
    from deploy.monitor.health import Pulse

    if watch and is_json:
        raise InputError("--json shows the status once: leave --watch out")
    pulse = Pulse()

    async def looked_up(source: Any, name: str | None) -> list[Any]:
        found = await source.runs() if name is None else [await _status(source, name, run)]
        return [pulse.marked(each) for each in found]

    async def shown(source: Any, name: str | None) -> Any:
        found = await looked_up(source, name)
        return show_runs(found) if name is None else show_run(found[0])

    async def show(source: Any, name: str | None) -> None:
        if is_json:
            held = [each.model_dump(mode="json") for each in await looked_up(source, name)]
            typer.echo(json.dumps(held if name is None else held[0], indent=1))
            return
        console = Console(markup=False, emoji=False)  # messages may hold brackets
        if not watch:
            console.print(await shown(source, name))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(await shown(source, name), refresh=True)
                await asyncio.sleep(1.0)

    _with_source(run, board, show, lists=True)


def scale(
    run: RunArgument,
    pool: Annotated[str, typer.Argument(help="rollout, reward/SCORER, or learner.")],
    count: Annotated[int, typer.Argument(min=1, max=1024, help="Desired number of actors.")],
    board: BoardOption = None,
) -> None:
    """Set the desired size of a pool, or of the learner group; the results stay the same.

    A larger size: at most 8 actors of a pool start at a time, and those that fail use up no restarts. A rollout actor
    proves the digest of the newest adapter before it works; learner workers load the model while the group continues,
    and take over some of its lanes between two updates.

    A smaller size: actors that wait for a node withdraw first, then others end after their call. The condition
    PoolSettled/POOL says what is missing until the size is reached. An actor without room is a demand on the cluster,
    for which an autoscaler starts a node; it ends nodes without actors after its idle time.

    After a crash the run keeps desired sizes that were not refused; after a stop, a failure or the end it starts with
    the config's.

    A run with --local, and rollout and learner with cluster.layout colocated or joint, cannot be scaled.
    """
    _send(run, board, kind="scale", pool=pool, count=count)


def pause(run: RunArgument, board: BoardOption = None) -> None:
    """Pause a run after the iteration in progress; its actors stay and keep their GPUs.

    With group.max_lag above 0 the groups in flight are finished. After a crash the run is still paused; after a stop, a
    failure or the end it starts unpaused.
    """
    _send(run, board, kind="pause")


def resume(run: RunArgument, board: BoardOption = None) -> None:
    """Resume a paused run."""
    _send(run, board, kind="resume")


def checkpoint(run: RunArgument, board: BoardOption = None) -> None:
    """Write a checkpoint after the iteration in progress, or at once while the run is paused."""
    _send(run, board, kind="checkpoint")


def stop(run: RunArgument, board: BoardOption = None) -> None:
    """Stop a run after the update in progress, with a checkpoint."""
    _send(run, board, kind="stop")


def _send(
    run: str, board: str | None, *, kind: "CommandKind", pool: str | None = None, count: int | None = None
) -> None:
    from deploy.monitor.health import Pulse, refusal_of
    from protocol.commands import new_command
    from protocol.status import FIXED_SIZE

    async def send(source: Any, name: str | None) -> None:
        assert name is not None
        found = await _status(source, name, run)
        if reason := refusal_of(Pulse().marked(found)):
            raise BoardError(f"run {run} {reason}")
        pools = {held.name: held for held in found.pools}
        if pool is not None and pool not in pools:
            raise InputError(f"run {run} has no pool {pool!r}: its pools are {', '.join(pools)}")
        if pool is not None and not pools[pool].is_resizable:
            raise InputError(f"{pool} of run {run} cannot be scaled: {FIXED_SIZE}")
        command = new_command(kind, pool=pool, count=count)
        await source.send(name, command)
        typer.echo(await _outcome(source, name, command.id))

    _with_source(run, board, send)


async def _outcome(source: Any, run: str, command: str) -> str:
    until = time.monotonic() + OUTCOME_S
    sent = None
    while time.monotonic() < until:
        sent = await source.command(run, command)
        if sent and not sent.is_open:
            break
        await asyncio.sleep(0.2)
    if sent is None or sent.state == "accepted":
        return f"sent; the run has not started it within {OUTCOME_S:.0f} s"
    if sent.state == "working":
        return "in progress; `flowcredit status RUN` shows its progress"
    if sent.state == "failed":
        raise BoardError(sent.message)
    return f"{sent.state}: {sent.message}"


def _with_source(
    run: str | None, board: str | None, work: Callable[[Any, str | None], Awaitable[None]], *, lists: bool = False
) -> None:
    """Run `work` with the source and the name of a run; None for all, also for a folder of runs if `lists`."""
    from deploy.api.source import open_source
    from protocol.status import run_id_of

    if board:
        where, name = board, run and run_id_of(Path(run).resolve().name)
    elif run is None:
        where, name = str(runs_folder()), None
    else:
        folder = found_run(run)
        has_many = is_folder_of_runs(folder)
        if has_many and not lists:
            raise RunFolderError(f"{run} is a folder of runs: name one of them; `flowcredit status {run}` lists them")
        where, name = str(folder), None if has_many else run_id_of(folder.resolve().name)

    async def opened() -> None:
        source = open_source(where)
        try:
            await work(source, name)
        finally:
            await source.close()

    with suppress(KeyboardInterrupt):
        asyncio.run(opened())


async def _status(source: Any, name: str | None, run: str | None) -> Any:
    """Return the status of one run (RunFolderError: there is no such run)."""
    found = await source.status(name)
    if found is None:
        raise RunFolderError(f"there is no run {run}: `flowcredit status` lists all runs")
    return found
