"""Two machines that share a board and a store of copies, but no disk: one trains, and the other takes over its run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from deploy.board.board import Board
from deploy.board.embedded import BoardServer
from protocol.commands import new_command
from tests.support.runs.scene import Driver, preset, require_undisturbed
from tests.support.services.boards import answers
from tests.support.waiting import until, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
PROGRAM = (
    "-c",
    "from deploy.board import lease\nlease.TTL_S, lease.BoardLease.renew_s = 4.0, 0.5\n"
    "from deploy.cli.app import main\nmain()",
)
"""`flowcredit` with leases that run out within seconds."""


@pytest.fixture
def board(tmp_path: Path) -> Iterator[str]:
    server = BoardServer(tmp_path)
    server.start()
    with Redis.from_url(server.url) as client:
        wait_until(lambda: answers(client))
    yield server.url
    server.stop()


async def paused(url: str) -> None:
    """Returns when the run rests between two iterations."""
    board = Board(url)
    await board.send("run", new_command("pause"))

    async def rests() -> bool:
        status = await board.status("run")
        return status is not None and status.phase == "paused"

    await until(rests)
    status = await board.status("run")
    assert status is not None and status.iteration < 20
    await board.close()


def test_a_machine_takes_over_the_run_of_one_that_is_gone_and_ends_in_the_same_weights(
    undisturbed, board, tmp_path, tiny_sd3, monkeypatch
):
    monkeypatch.setenv("FLOWCREDIT_BOARD", board)
    heard = {"heartbeat_s": 0.1}  # the pause comes before the last iteration, however fast they are
    path = preset(tmp_path, tiny_sd3, checkpoint={"every": 4, "url": f"file://{tmp_path}/store"}, status=heard)
    first = Driver(path, tmp_path / "here" / "run", "--local", program=PROGRAM)
    first.wait_for_iteration(5)
    asyncio.run(paused(board))
    second = Driver(path, tmp_path / "there" / "run", "--local", program=PROGRAM)
    assert second.process.wait(120) == 2
    second.wait_for(lambda line: f"run 'run' is in use by process {first.process.pid} on" in line)
    assert not (tmp_path / "there" / "run").exists()
    first.kill()
    said = Driver(path, tmp_path / "there" / "run", "--local", program=PROGRAM).finish()
    assert "continuing from" in said
    require_undisturbed(tmp_path / "there" / "run", undisturbed)
