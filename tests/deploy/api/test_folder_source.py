"""Runs of a folder: those that ended are read from their files, whatever state these are in."""

import asyncio
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from deploy.api import folder_source
from deploy.api.folder_source import FolderSource
from deploy.board.board import Board, Update
from deploy.folder.names import CONFIG, METRICS, STATUS
from deploy.folder.read import StatusFile
from protocol.commands import Command, new_command
from protocol.errors import BoardError
from protocol.status import MetricLine, RunStatus
from tests.support.services.boards import answering, board_of
from tests.support.waiting import until


@pytest.fixture
def make(tmp_path: Path, tiny_config):
    def run(name: str, *, iterations: int = 2, done: int = 2) -> Path:
        folder = tmp_path / "runs" / name
        (folder / "trajectories").mkdir(parents=True)
        (folder / CONFIG).write_text(tiny_config(iterations=iterations).to_yaml())
        lines = [{"iteration": n, "reward/mean": n / 4, "seconds/update": 1.0} for n in range(1, done + 1)]
        (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return run


def filed(name: str, phase: str, updated: float) -> str:
    status = RunStatus(
        run=name, session="s", phase=phase, iteration=1, iterations=2, started=updated - 9, updated=updated
    )
    return StatusFile(status=status).model_dump_json()


def read(source: FolderSource, run: str) -> RunStatus:
    found = asyncio.run(source.status(run))
    assert found is not None
    return found


def test_a_run_without_status_file_is_told_from_its_metrics(make, tmp_path):
    make("done")
    make("cut off", iterations=9)
    source = FolderSource(tmp_path / "runs")
    done, cut = read(source, "done"), read(source, "cut-off")
    assert (done.phase, done.iteration, done.rewards.now, done.lines) == ("finished", 2, 0.5, 2)
    assert (cut.phase, cut.iteration, cut.iterations) == ("stopped", 2, 9)
    assert asyncio.run(source.lines("done", since=1, limit=9))[0].values["reward/mean"] == 0.5
    assert asyncio.run(source.status("nobody")) is None
    assert asyncio.run(source.lines("nobody", since=0, limit=9)) == []


def test_a_killed_run_is_not_heard_of_and_shows_what_its_metrics_say(make, tmp_path):
    folder = make("killed", iterations=9)
    (folder / STATUS).write_text(filed("killed", "running", time.time() - 600))
    (folder / "board.url").write_text(f"unix://{folder}/board.sock")
    status = read(FolderSource(tmp_path / "runs"), "killed")
    assert status.stale_since == status.updated, "nobody holds the folder's lease"
    assert (status.phase, status.iteration, status.lines) == ("running", 2, 2)
    with pytest.raises(BoardError, match="it takes no commands"):
        asyncio.run(FolderSource(tmp_path / "runs").send("killed", new_command("stop")))


@pytest.mark.parametrize("way", ["through a link", "from inside"])
async def test_a_live_run_is_found_by_any_path_to_its_folder(make, tmp_path, monkeypatch, way: str):
    folder = make("mine", iterations=9)
    (tmp_path / "another-name").symlink_to(folder)
    monkeypatch.chdir(folder)
    path = tmp_path / "another-name" if way == "through a link" else Path(".")
    with board_of("valkey", folder) as url:
        source, board = FolderSource(path), Board(url)
        await answering(board)
        now = time.time()
        status = RunStatus(
            run="mine", session="s", phase="running", iteration=1, iterations=9, started=now, updated=now
        )
        await board.write(Update(status, lines=[MetricLine(seq=1, values={"reward/mean": 0.75})]), keep_s=60)
        (name,) = [found.run for found in await source.runs()]
        command = new_command("pause")
        await source.send(name, command)
        found = await source.status(name)
        assert found is not None and found.phase == "running"
        assert [line.values["reward/mean"] for line in await source.lines(name, since=0, limit=9)] == [0.75]
        assert await source.command(name, command.id) is not None, "a command reaches the run"
        await board.close()
        await source.close()


def test_the_list_of_ended_runs_reads_the_end_of_their_metrics_only(make, tmp_path):
    folder = make("long")
    lines = (folder / METRICS).read_bytes()
    with (folder / METRICS).open("wb") as file:  # 64 GiB that take no room on the disk, then the last lines
        file.truncate(64 * 1024**3)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + lines)
    status = RunStatus(run="long", session="s", phase="finished", iteration=2, iterations=2, started=1, updated=2)
    status.lines, status.rewards.now = 2, 0.5
    (folder / STATUS).write_text(StatusFile(status=status).model_dump_json())
    (found,) = asyncio.run(FolderSource(tmp_path / "runs").runs())
    assert (found.run, found.lines, found.rewards.now) == ("long", 2, 0.5)


def test_a_status_that_is_older_than_the_metrics_is_brought_up_to_date(make, tmp_path):
    folder = make("killed", done=60, iterations=60)
    with (folder / METRICS).open("a") as file:
        file.write('{"iteration": 60, "evaluation/score": 0.75}\n')
    first = '{"iteration": 0, "evaluation/score": 0.25}\n'
    (folder / METRICS).write_text(first + (folder / METRICS).read_text())
    (folder / STATUS).write_text(filed("killed", "finished", time.time() - 600))
    status = read(FolderSource(tmp_path / "runs"), "killed")
    assert (status.iteration, status.lines, status.rewards.now) == (60, 62, 15.0)
    assert (status.rewards.heldout_first, status.rewards.heldout, status.rewards.heldout_iteration) == (0.25, 0.75, 60)
    assert status.rewards.trend == pytest.approx(2.5)


def test_metric_lines_are_read_page_by_page(make, tmp_path):
    folder = make("long", done=50)
    (folder / METRICS).write_bytes((folder / METRICS).read_bytes().replace(b'"iteration": 12,', b'"iteration" 12,'))
    source = FolderSource(tmp_path / "runs")

    def page(since: int, limit: int) -> list[int]:
        return [line.seq for line in asyncio.run(source.lines("long", since=since, limit=limit))]

    assert page(0, 3) == [1, 2, 3]
    assert page(10, 3) == [11, 13], "a damaged line is left out, the others keep their numbers"
    assert page(48, 9) == [49, 50]
    assert page(50, 9) == page(99, 9) == []
    line = asyncio.run(source.lines("long", since=48, limit=1))[0]
    assert line.values["reward/mean"] == 49 / 4


def test_names_that_would_be_equal_are_told_apart(make, tmp_path):
    make("a b", done=1)
    runs = tmp_path / "runs"
    assert [status.run for status in asyncio.run(FolderSource(runs).runs())] == ["a-b"]
    make("a-b", done=2)
    make("a+b", done=1)
    (runs / "link").symlink_to(runs / "a-b")
    held = {status.run: status.iteration for status in asyncio.run(FolderSource(runs).runs())}
    assert held.pop("a-b") == 2, "a folder whose name is an id has this id"
    assert len(held) == 2 and set(held.values()) == {1}
    assert all(re.fullmatch(r"a-b-[0-9a-f]{8}", name) for name in held)
    again = {status.run for status in asyncio.run(FolderSource(runs).runs())}
    assert again == held.keys() | {"a-b"}, "names stay"


async def test_connections_to_boards_of_folders_that_are_gone_are_closed(make, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_source, "SCAN_S", 0.0)
    make("stays")
    folder = make("goes")
    with board_of("valkey", folder) as url:
        source, board, client = FolderSource(tmp_path / "runs"), Board(url), Redis.from_url(url)
        await answering(board)
        await board.close()

        async def is_alone() -> bool:
            return len(await client.client_list()) == 1

        await until(is_alone)  # the server sees it a moment later
        await source.runs()
        assert len(await client.client_list()) == 2
        folder.rename(tmp_path / "elsewhere")
        await source.runs()
        await until(is_alone)
        await source.close()
        await client.aclose()


@pytest.mark.parametrize("name", ["mine", "d" * 90], ids=["socket in its folder", "socket elsewhere"])
def test_a_folder_that_was_moved_is_not_the_run_where_it_was(make, tmp_path, name):
    """What a killed run leaves names its board; by now another run may have one there."""
    folder = make(name)
    (folder / STATUS).write_text(filed(name, "running", time.time()))
    moved = tmp_path / "archive" / name

    async def scenario(url: str) -> tuple[RunStatus | None, RunStatus | None, list[Command]]:
        board = Board(url)
        await answering(board)
        shutil.copytree(folder, moved, ignore=shutil.ignore_patterns("board.sock"))
        newer = RunStatus(run=name, session="new", phase="running", iteration=7, iterations=9, started=1, updated=2)
        await board.write(Update(newer), keep_s=1000)
        here, there = FolderSource(folder.parent), FolderSource(moved.parent)
        statuses = await here.status(name), await there.status(name)
        with pytest.raises(BoardError, match="takes no commands"):
            await there.send(name, new_command("stop"))
        asked = (await board.write(Update(newer), keep_s=1000)).asked
        for each in (here, there, board):
            await each.close()
        return *statuses, asked

    with board_of("valkey", folder) as url:
        here, there, asked = asyncio.run(scenario(url))
    assert here is not None and there is not None
    assert (here.session, there.session, there.iteration) == ("new", "s", 2)
    assert asked == []


def test_lines_that_a_living_run_s_board_has_dropped_are_read_from_its_folder(make, tmp_path):
    folder = make("long", done=6)

    async def scenario(url: str) -> list[list[int]]:
        board, source = Board(url), FolderSource(tmp_path / "runs")
        await answering(board)
        status = RunStatus(run="long", session="s", phase="running", iteration=8, iterations=9, started=1, updated=2)
        lines = [MetricLine(seq=seq, values={"iteration": seq}) for seq in range(4, 9)]
        await board.write(Update(status.model_copy(update={"lines": 8}), lines=lines), keep_s=1000)
        pages = [[line.seq for line in await source.lines("long", since=since, limit=4)] for since in (0, 2, 4, 8)]
        await source.close()
        await board.close()
        return pages

    with board_of("valkey", folder) as url:
        assert asyncio.run(scenario(url)) == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 7, 8], []]


def test_a_link_to_itself_hides_no_run(make, tmp_path):
    make("whole")
    (tmp_path / "runs" / "loop").symlink_to("loop")
    assert [status.run for status in asyncio.run(FolderSource(tmp_path / "runs").runs())] == ["whole"]


def test_damaged_files_hide_no_other_run(make, tmp_path):
    folder = make("damaged")
    (folder / STATUS).write_text('{"status": ')
    (folder / METRICS).write_bytes(b'{"iteration": 1, "reward/mean": 0.25}\n\xff\x00 no json\n[1]\n{"iteration": 2')
    (folder / "trajectories" / "trajectories_000001.json").write_text("{")
    (folder / "board.url").write_bytes(b"\xff\xfe")
    (make("no-address") / "board.url").write_text("http://nowhere")
    make("whole")
    source = FolderSource(tmp_path / "runs")
    assert {status.run for status in asyncio.run(source.runs())} == {"damaged", "no-address", "whole"}
    assert read(source, "damaged").iteration == 1
    assert asyncio.run(source.record("damaged", 1)) is None


def test_new_runs_appear_and_changed_files_are_read_again(make, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_source, "SCAN_S", 0.0)
    folder = make("first")
    source = FolderSource(tmp_path / "runs")
    assert read(source, "first").iteration == 2
    with (folder / METRICS).open("a") as file:
        file.write('{"iteration": 3, "reward/mean": 1.0}\n')
    os.utime(folder / METRICS, (1, 1))
    assert read(source, "first").iteration == 3
    make("second")
    assert {status.run for status in asyncio.run(source.runs())} == {"first", "second"}


def test_a_run_folder_itself_is_a_folder_of_one_run_and_an_empty_one_of_none(make, tmp_path):
    folder = make("mine")
    assert [status.run for status in asyncio.run(FolderSource(folder).runs())] == ["mine"]
    assert asyncio.run(FolderSource(tmp_path / "nowhere").runs()) == []
