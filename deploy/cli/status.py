"""The commands that look at runs and steer them; the words are those of the API.

RUN is a run folder, or a run's name in `runs/`; with FLOWCREDIT_BOARD or --board the run of that name there.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.config.status import BOARD_VARIABLE
from protocol.errors import BoardError, InputError, RunFolderError

OUTCOME_S = 5.0
"""Seconds that a command's outcome is waited for."""
Run = Annotated[str, typer.Argument(help="A run folder, or a run's name in runs/ or on the board.")]
BoardOption = Annotated[
    str | None, typer.Option("--board", envvar=BOARD_VARIABLE, help="Address of a board; default: the runs' own.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(serve)
    app.command()(status)
    app.command()(scale)
    for name, text in ORDERS.items():
        app.command(name, help=text)(_order(name))


ORDERS = {
    "pause": "Pause a run after the iteration in progress; its actors stay.",
    "resume": "Let a paused run go on.",
    "checkpoint": "Write a checkpoint between two iterations.",
    "stop": "End a run after the update in progress, with a checkpoint.",
}


def serve(
    where: Annotated[
        str | None, typer.Argument(help="A folder of runs, a run folder, or a board's address; default runs/.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8400,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token; default: the environment's FLOWCREDIT_TOKEN.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name by which a server on loopback may be called.")
    ] = None,
) -> None:
    """Serve the page and the status API of running and ended runs."""
    from deploy.api.auth import read_token
    from deploy.api.serve import serve as serve_forever

    serve_forever(
        where or os.environ.get(BOARD_VARIABLE) or "runs",
        host=host,
        port=port,
        token=read_token(token_file),
        allowed_hosts=tuple(allow_host or ()),
        say=typer.echo,
    )


def status(
    run: Annotated[str | None, typer.Argument(help="A run folder or name; none lists all runs.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing it until Ctrl-C.")] = False,
    board: BoardOption = None,
) -> None:
    """Show what a run does."""
    from rich.console import Console
    from rich.live import Live

    from deploy.cli.tables import show_run, show_runs

    async def shown(source: Any, name: str | None) -> Any:
        if name is None:
            return show_runs(await source.runs())
        found = await source.status(name)
        if found is None:
            raise RunFolderError(f"there is no run {run}: `flowcredit status` lists those there are")
        return show_run(found)

    async def go(source: Any, name: str | None) -> None:
        console = Console(markup=False, emoji=False)  # messages may hold brackets
        if not watch:
            console.print(await shown(source, name))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(await shown(source, name), refresh=True)
                await asyncio.sleep(1.0)

    _with_source(run, board, go)


def scale(
    run: Run,
    pool: Annotated[str, typer.Argument(help="rollout, or reward/SCORER.")],
    count: Annotated[int, typer.Argument(min=1, max=1024, help="Actors to have.")],
    board: BoardOption = None,
) -> None:
    """Wish for another number of actors of a pool; results do not change."""
    _ask(run, board, kind="scale", pool=pool, count=count)


def _order(kind: str) -> Callable[..., None]:
    def command(run: Run, board: BoardOption = None) -> None:
        _ask(run, board, kind=kind)

    return command


def _ask(run: str, board: str | None, *, kind: str, pool: str | None = None, count: int | None = None) -> None:
    from protocol.commands import new_command
    from protocol.status import ENDED, staleness_of

    async def go(source: Any, name: str | None) -> None:
        assert name is not None
        found = await source.status(name)
        if found is None:
            raise RunFolderError(f"there is no run {run}: `flowcredit status` lists those there are")
        if found.phase in ENDED or staleness_of(found, now=time.time()):
            word = f"has {found.phase}" if found.phase in ENDED else "is not heard of"
            raise BoardError(f"run {run} {word}: nothing can be asked of it")
        pools = {held.name: held for held in found.pools}
        if pool is not None and pool not in pools:
            raise InputError(f"run {run} has no pool {pool!r}: there are {', '.join(pools)}")
        if pool is not None and not pools[pool].is_resizable:
            raise InputError(f"run {run} is one process (--local) and cannot be scaled")
        command = new_command(kind, pool=pool, count=count)  # pyright: ignore[reportArgumentType]
        await source.ask(name, command)
        typer.echo(await _outcome(source, name, command.id))

    _with_source(run, board, go)


async def _outcome(source: Any, run: str, command: str) -> str:
    until = time.monotonic() + OUTCOME_S
    found = None
    while time.monotonic() < until:
        found = await source.command(run, command)
        if found and not found.is_open:
            break
        await asyncio.sleep(0.2)
    if found is None or found.state == "accepted":
        return f"asked for; the run has not taken it up within {OUTCOME_S:.0f} s"
    if found.state == "working":
        return "taken up; `flowcredit status` shows how it goes on"
    if found.state == "failed":
        raise BoardError(found.message)
    return f"{found.state}: {found.message}"


def _with_source(run: str | None, board: str | None, go: Callable[[Any, str | None], Awaitable[None]]) -> None:
    from deploy.api.serve import source_of
    from protocol.status import run_id_of

    if board:
        where, name = board, run and run_id_of(Path(run).resolve().name)
    elif run is None:
        where, name = "runs", None
    else:
        folder = Path(run) if Path(run).is_dir() else Path("runs") / run
        if not folder.is_dir():
            raise RunFolderError(f"there is no run folder {run} and no runs/{run}: give one, or --board")
        where, name = str(folder), run_id_of(folder.resolve().name)

    async def opened() -> None:
        source = source_of(where)
        try:
            await go(source, name)
        finally:
            await source.close()

    with suppress(KeyboardInterrupt):
        asyncio.run(opened())
