"""Runs of a folder: those that ended are read from their files, whatever state these are in."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from deploy.api import folder_source
from deploy.api.folder_source import FolderSource
from deploy.board.board import Board, Update
from deploy.board.embedded import BoardServer
from deploy.folder.names import CONFIG, METRICS, STATUS
from deploy.folder.read import StatusFile
from protocol.commands import Command, new_command
from protocol.errors import BoardError
from protocol.status import MetricLine, RunStatus, staleness_of


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
    assert staleness_of(status, now=time.time()) == status.updated
    assert (status.phase, status.iteration, status.lines) == ("running", 2, 2)
    with pytest.raises(BoardError, match="it takes no commands"):
        asyncio.run(FolderSource(tmp_path / "runs").ask("killed", new_command("stop")))


@pytest.mark.parametrize("way", ["through a link", "from inside"])
def test_a_live_run_is_found_by_any_path_to_its_folder(make, tmp_path, monkeypatch, way: str):
    folder = make("mine", iterations=9)
    (tmp_path / "another-name").symlink_to(folder)
    monkeypatch.chdir(folder)
    path = tmp_path / "another-name" if way == "through a link" else Path(".")
    server = BoardServer(folder)
    server.start()

    async def asked() -> tuple[RunStatus | None, list[MetricLine], Command | None]:
        source, board = FolderSource(path), Board(server.url)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                await board.ping()
                break
            except BoardError:
                await asyncio.sleep(0.05)
        now = time.time()
        status = RunStatus(
            run="mine", session="s", phase="running", iteration=1, iterations=9, started=now, updated=now
        )
        await board.write(Update(status, lines=[MetricLine(seq=1, values={"reward/mean": 0.75})]), keep_s=60)
        (name,) = [found.run for found in await source.runs()]
        command = new_command("pause")
        await source.ask(name, command)
        answers = await source.status(name), await source.lines(name, since=0, limit=9)
        found = await source.command(name, command.id)
        await board.close()
        await source.close()
        return *answers, found

    try:
        status, lines, command = asyncio.run(asked())
    finally:
        server.stop()
    assert status is not None and status.phase == "running"
    assert [line.values["reward/mean"] for line in lines] == [0.75]
    assert command is not None, "a command reaches the run"


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
