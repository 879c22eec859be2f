"""A run that is watched and steered: the same weights as one that nobody sees, whatever happens to the board."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from deploy.api.folder_source import FolderSource
from deploy.board import publisher
from deploy.board.board import Board
from deploy.board.embedded import BOARD_URL
from deploy.folder.run_folder import open_run_folder
from deploy.monitor import trackers
from deploy.monitor.journal import RunJournal
from deploy.monitor.observe import Observed
from deploy.monitor.progress import Progress
from deploy.monitor.summary import step_rewards_of
from deploy.run.local import LocalFleet
from protocol.commands import Command, new_command
from protocol.config.run import RunConfig
from protocol.errors import BoardError, LeaseLostError, NonFiniteError
from protocol.status import RunStatus
from tests.support.programs import need
from tests.support.runs.watched import REDNESS, Scene, comes_to, go, left_behind
from tests.support.services.boards import answering, end_server
from tests.support.waiting import PATIENCE_S, until

Config = Callable[..., RunConfig]
OUTAGE_S = float(os.environ.get("FLOWCREDIT_TEST_OUTAGE_S", "2"))
"""How long Redis is gone in the test of that; 20 in the measured run."""


@pytest.fixture
def config(tiny_config: Config) -> Callable[..., RunConfig]:
    def make(iterations: int = 4, status: dict | None = None, group: dict | None = None, **sections: Any) -> RunConfig:
        settings = {"heartbeat_s": 0.05, "trajectories_every": 2} | (status or {})
        small = {"size": 2} | (group or {})
        return tiny_config(iterations=iterations, rewards=REDNESS, status=settings, group=small, **sections)

    return make


def test_a_watched_run_ends_in_the_weights_of_one_that_nobody_sees(config, tmp_path):
    seen = go(config(), tmp_path / "seen")
    unseen = go(config(status={"board": "off", "trajectories": 0}), tmp_path / "unseen")
    assert seen == unseen
    assert not list((tmp_path / "unseen" / "trajectories").glob("trajectories_*"))
    assert not (tmp_path / "seen" / BOARD_URL).exists()
    status = left_behind(tmp_path / "seen")
    assert (status.phase, status.iteration, status.adapter_version, status.lines) == ("finished", 4, 4, 6)
    assert status.trajectories == [1, 2, 4]
    assert set(step_rewards_of(status.metrics)) == {"0", "1", "2"}
    assert status.metrics["train/first_ratio_deviation"] == 0.0
    assert status.staleness == 0
    assert status.bottleneck is not None


def test_scored_groups_that_wait_for_the_learner_are_counted(config, tmp_path):
    async def look(scene: Scene) -> None:
        await scene.outcome(await scene.ask("pause"))

        async def all_wait() -> bool:
            return scene.observed.reporter.status().queues == {"groups/in_work": 0, "groups/scored": 2}

        await until(all_wait)
        await scene.outcome(await scene.ask("resume"))

    go(config(iterations=8, group={"max_lag": 1}), tmp_path / "run", beside=look, slow_s=0.1)
    assert left_behind(tmp_path / "run").queues == {"groups/in_work": 0, "groups/scored": 0}


class Album:
    """A tracker that notes what images it is shown."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder, self.seen = folder, []

    def log(self, iteration: int, values: dict) -> None:
        """Numbers are not looked at."""

    def show(self, iteration: int, images: list) -> None:
        self.seen += [[iteration, image.name] for image in images]

    def close(self) -> None:
        (self.folder / "seen").write_text(json.dumps(self.seen))


def test_trackers_see_the_images_of_evaluations_and_the_recorded_trajectories(config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSING_S", PATIENCE_S)
    go(config(iterations=2, status={"trackers": [f"{__name__}:Album"]}), tmp_path / "run")
    seen = json.loads((tmp_path / "run" / "seen").read_text())
    assert [2, "trajectories/sheet"] in seen
    assert [2, "evaluation/image_00"] in seen


@pytest.mark.parametrize("values", ["raw", "calibrated"])
def test_recorded_trajectories_hold_rewards_values_and_what_the_learner_made_of_them(config, tmp_path, values):
    go(config(iterations=2, credit={"rule": "gains", "values": values}), tmp_path / "run")
    record = asyncio.run(FolderSource(tmp_path / "run").record("run", 2))
    assert record is not None
    assert (record.steps, record.width, record.height, len(record.trajectories)) == ([0, 1, 2], 16, 16, 2)
    for trajectory in record.trajectories:
        assert (trajectory.values is None) == (values == "raw")
        held = trajectory.rewards if trajectory.values is None else trajectory.values
        differences = [later - earlier for earlier, later in itertools.pairwise(held)]
        assert trajectory.step_rewards == pytest.approx(differences, abs=2e-6)
        assert len(trajectory.advantages) == 3
        assert any(trajectory.advantages)


def test_pause_checkpoint_resume_and_stop_have_outcomes_and_change_no_weights(config, tmp_path):
    async def steer(scene: Scene) -> None:
        paused = await scene.ask("pause")
        assert await scene.outcome(paused) == ("done", "paused between two iterations")
        iteration = scene.observed.reporter.status().iteration
        kept = await scene.ask("checkpoint")
        assert await scene.outcome(kept) == ("done", "written")
        assert (scene.run.checkpoints / f"iteration_{iteration:06d}").is_dir()
        assert scene.observed.reporter.status().phase == "paused"
        again = await scene.ask("pause")
        assert await scene.outcome(again) == ("done", "paused between two iterations")
        scaled = await scene.ask("scale", pool="rollout", count=2)
        assert (await scene.outcome(scaled))[0] == "failed"
        assert scene.observed.reporter.status().iteration == iteration
        resumed = await scene.ask("resume")
        assert await scene.outcome(resumed) == ("done", "the run continues")

    steered = go(config(checkpoint={"every": 100}), tmp_path / "steered", beside=steer, slow_s=0.2)
    assert steered == go(config(), tmp_path / "plain")

    async def end(scene: Scene) -> None:
        await until(lambda: comes_to(scene, 2))
        stopped = await scene.ask("stop")
        await scene.stop.wait()
        assert stopped in scene.observed.reporter.buffers.commands

    go(config(iterations=50), tmp_path / "stopped", beside=end, slow_s=0.1)
    status = left_behind(tmp_path / "stopped")
    assert status.phase == "stopped"
    assert status.iteration < 50
    assert status.checkpoint == status.iteration
    commands = json.loads((tmp_path / "stopped" / "status.json").read_text())["commands"]
    assert [(command["kind"], command["state"]) for command in commands] == [("stop", "done")]


def test_the_heartbeat_goes_on_while_a_slow_disk_takes_checkpoints_galleries_and_records(config, tmp_path, monkeypatch):
    """A disk that takes a file only when readers of the board have seen two more statuses since."""
    seen: dict[str, list[bool]] = {"checkpoints": [], "gallery": [], "trajectories": []}
    url = ""

    def heard() -> str:
        status = Redis.from_url(url).get("flowcredit:run:slow:status")
        return json.loads(status)["updated"] if status else ""  # pyright: ignore[reportArgumentType]

    def wait(kind: str) -> None:
        end, moments = time.monotonic() + PATIENCE_S, {heard()}
        while len(moments) < 3 and time.monotonic() < end:
            time.sleep(0.01)
            moments.add(heard())
        seen[kind].append(len(moments) == 3)

    def slow(call: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
        def called(*words: Any) -> Any:
            kind = next((kind for kind in seen if f"/slow/{kind}/" in path_of(*words)), None)
            if url and kind and len(seen[kind]) < 2:
                wait(kind)
            return call(*words)

        return called

    monkeypatch.setattr("os.fsync", slow(os.fsync, lambda file: os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr("os.replace", slow(os.replace, lambda _, path: os.fspath(path)))

    async def look(scene: Scene) -> None:
        nonlocal url
        board = Board((scene.run.path / BOARD_URL).read_text())
        await answering(board)
        await board.close()
        url = board.url
        await until(lambda: all(len(each) == 2 for each in seen.values()))
        scene.stop.set()

    slowly = config(iterations=5000, checkpoint={"every": 1}, evaluation={"every": 1})
    ended = go(slowly, tmp_path / "slow", beside=look)
    monkeypatch.undo()
    assert ended == go(config(iterations=left_behind(tmp_path / "slow").iteration), tmp_path / "plain")
    assert seen == {kind: [True, True] for kind in seen}
    events = [json.loads(line)["iteration"] for line in (tmp_path / "slow" / "metrics.jsonl").read_text().splitlines()]
    assert events == sorted(events)


def test_a_task_that_misses_its_cancellation_does_not_keep_the_run_from_ending(config, tmp_path):
    missed = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                missed.append(1)
                if len(missed) > 1:
                    raise

    async def add(scene: Scene) -> None:
        scene.observed.run_beside(stubborn)

    go(config(iterations=1), tmp_path / "run", beside=add, slow_s=0.1)
    assert left_behind(tmp_path / "run").phase == "finished"
    assert len(missed) == 2


def test_a_stop_ends_a_pause(config, tmp_path):
    async def steer(scene: Scene) -> None:
        await scene.outcome(await scene.ask("pause"))
        await scene.ask("stop")

    go(config(iterations=50), tmp_path / "run", beside=steer, slow_s=0.05)
    assert left_behind(tmp_path / "run").phase == "stopped"


@pytest.mark.parametrize("ahead_s", [-3600.0, 30.0])
def test_a_command_to_an_earlier_process_is_refused_and_one_to_this_process_is_not_whatever_the_clocks_say(
    config, tmp_path, redis, monkeypatch, ahead_s
):
    monkeypatch.setenv("FLOWCREDIT_BOARD", address := f"unix://{tmp_path / 'r.sock'}")
    redis()

    def asked_by_another_host(kind: str) -> Command:
        return new_command(kind).model_copy(update={"requested": time.time() + ahead_s})  # pyright: ignore[reportArgumentType]

    async def leave(command: Command) -> None:
        board = Board(address)
        await answering(board)
        await board.send("run", command)
        await board.close()

    old, new = asked_by_another_host("stop"), asked_by_another_host("checkpoint")
    asyncio.run(leave(old))

    async def steer(scene: Scene) -> None:
        assert await scene.outcome(old.id) == (
            "failed",
            "it was meant for an earlier process of this run; send it again",
        )
        await leave(new)
        assert await scene.outcome(new.id) == ("done", "written")

    go(config(), tmp_path / "run", beside=steer, slow_s=0.2)
    assert left_behind(tmp_path / "run").phase == "finished"


@pytest.mark.parametrize("phase", ["paused", "stopped"])
def test_a_pause_and_a_desired_size_survive_a_crash_but_not_a_normal_exit(config, tmp_path, phase):
    """What lies in the folder when a process is killed: the status that it wrote when the pause was asked for."""
    texts = []

    async def pause(scene: Scene) -> None:
        await scene.outcome(await scene.ask("pause"))

        async def is_written() -> bool:
            texts.append(json.loads((scene.run.path / "status.json").read_text()))
            return texts[-1]["status"]["is_pause_requested"]

        await until(is_written)
        scene.stop.set()

    go(config(), tmp_path / "run", beside=pause, slow_s=0.1)
    left = texts[-1]
    left["status"] |= {"phase": phase, "desired_sizes": {"rollout": 2}}
    (tmp_path / "run" / "status.json").write_text(json.dumps(left))

    async def look(scene: Scene) -> None:
        held = scene.observed.reporter.buffers.commands
        if phase == "stopped":
            await until(lambda: comes_to(scene, 2))
            assert not held
            return

        async def is_paused() -> bool:
            return scene.observed.reporter.phase == "paused"

        await until(is_paused)
        outcomes = [(command.kind, command.state) for command in held.values()]
        assert outcomes == [("scale", "failed"), ("pause", "done")], "a run in one process cannot be scaled"
        assert scene.observed.reporter.status().desired_sizes == {}, "the size was refused: no later process gets it"

        async def is_forgotten() -> bool:
            return json.loads((scene.run.path / "status.json").read_text())["status"]["desired_sizes"] == {}

        await until(is_forgotten)
        events = [event.message for event in scene.observed.reporter.buffers.events]
        assert any(message.endswith("still hold: rollout to 2 actors, pause") for message in events)
        await scene.outcome(await scene.ask("resume"))
        assert not scene.observed.reporter.status().is_pause_requested

    go(config(), tmp_path / "run", beside=look, slow_s=0.1)
    assert left_behind(tmp_path / "run").phase == "finished"


def test_a_failed_run_says_why_and_warnings_become_events(config, tmp_path):
    async def warn(scene: Scene) -> None:
        logging.getLogger("actors.pool.pool").warning("rollout actor lost (%s)", "killed")
        logging.getLogger("some.library").warning("not ours")

    with pytest.raises(NonFiniteError):
        go(config(), tmp_path / "run", beside=warn, slow_s=0.1, fails_at=3)
    status = left_behind(tmp_path / "run")
    assert status.phase == "failed"
    messages = [error.message for error in status.errors]
    assert "rollout actor lost (killed)" in messages
    assert "not ours" not in messages
    assert messages[-1] == "the run failed: the loss must be finite, got NaN"
    broken = {condition.type: condition.message for condition in status.conditions if condition.status == "False"}
    assert broken["Guard/finite_numbers"] == "the loss must be finite, got NaN"


def test_a_board_that_is_never_there_costs_sight_and_nothing_else(config, tmp_path, monkeypatch):
    plain = go(config(), tmp_path / "plain")
    monkeypatch.setenv("FLOWCREDIT_BOARD", "redis://:word@127.0.0.1:1/0")
    assert go(config(), tmp_path / "alone") == plain
    status = left_behind(tmp_path / "alone")
    away = next(condition for condition in status.conditions if condition.type == "BoardConnected")
    assert (away.status, away.reason) == ("False", "Away")
    assert "word" not in (tmp_path / "alone" / "status.json").read_text()
    assert "word" not in (tmp_path / "alone" / "run.log").read_text()


def test_an_unusable_address_and_a_file_that_cannot_be_written_are_conditions(config, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWCREDIT_BOARD", "http://nowhere")

    async def look(scene: Scene) -> None:
        held = {c.type: c for c in scene.observed.reporter.status().conditions}
        assert held["BoardConnected"].reason == "Unusable"
        (scene.run.path / "status.json").unlink(missing_ok=True)
        (scene.run.path / "status.json").mkdir()
        await scene.observed.heartbeat.write_status()
        held = {c.type: c for c in scene.observed.reporter.status().conditions}
        assert (held["StatusWritten"].status, held["StatusWritten"].reason) == ("False", "WriteFailed")

    go(config(iterations=2), tmp_path / "run", beside=look, slow_s=0.2)


def test_a_killed_embedded_board_comes_back_by_itself(config, tmp_path):
    async def kill(scene: Scene) -> None:
        assert scene.observed.board is not None
        server = scene.observed.board.server
        assert server is not None
        board = Board(server.url)
        await answering(board)
        await end_server(server.url)
        scene.observed.reporter.event("the server was killed")

        async def knows() -> bool:
            with contextlib.suppress(BoardError):
                return "the server was killed" in [e.message for e in await board.events("run", since=0, limit=99)]
            return False

        await until(knows)
        await board.close()

    go(config(), tmp_path / "run", beside=kill, slow_s=0.3)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    program, running = need("redis-server"), []

    def start() -> "subprocess.Popen[bytes]":
        words = [program, "--port", "0", "--unixsocket", str(tmp_path / "r.sock"), "--save", ""]
        running.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_redis_killed_for_a_while_leaves_the_weights_and_no_gap(config, tmp_path, redis, monkeypatch):
    plain = go(config(iterations=8), tmp_path / "plain")
    monkeypatch.setenv("FLOWCREDIT_BOARD", f"unix://{tmp_path / 'r.sock'}")
    monkeypatch.setattr(publisher, "LINES_BUFFERED", 3)  # the other lines come from the run folder
    first = redis()
    board_holds: list[int] = []

    async def outage(scene: Scene) -> None:
        first.kill()
        first.wait()
        before = scene.observed.reporter.status().iteration
        await asyncio.sleep(OUTAGE_S)
        await until(lambda: comes_to(scene, before + 1))
        redis()
        board = Board(f"unix://{tmp_path / 'r.sock'}")

        async def whole() -> bool:
            with contextlib.suppress(BoardError):
                board_holds[:] = [line.seq for line in await board.lines("run", since=0, limit=999)]
                return len(board_holds) == 10
            return False

        await until(whole)
        await board.close()

    pace_s = OUTAGE_S / 6
    assert go(config(iterations=8), tmp_path / "run", beside=outage, slow_s=pace_s, waits=False) == plain
    assert board_holds == list(range(1, 11))


def test_a_driver_that_another_took_over_on_the_board_stops_and_writes_nothing_more(
    config, tmp_path, redis, monkeypatch
):
    monkeypatch.setenv("FLOWCREDIT_BOARD", f"unix://{tmp_path / 'r.sock'}")
    redis()
    left: dict[str, bytes] = {}
    taken: list[RunStatus | None] = []

    async def take_over(scene: Scene) -> None:
        run, lease = scene.run, scene.run.board_lease
        assert lease is not None
        await until(lambda: comes_to(scene, 2))

        async def is_held() -> bool:
            return not lease.trouble

        async def is_filed() -> bool:
            path = run.path / "status.json"
            return path.exists() and json.loads(path.read_text())["status"]["is_pause_requested"]

        await until(is_held)
        scene.observed.control.take(pause := new_command("pause"))  # no file is being written while they are read
        await scene.outcome(pause.id)
        await until(is_filed)
        board = Board(f"unix://{tmp_path / 'r.sock'}")
        theirs = {"host": "elsewhere", "pid": 7, "folder": "another", "id": "x"}
        Redis.from_url(f"unix://{tmp_path / 'r.sock'}").set(lease.fence.key, json.dumps(theirs))
        before = await board.status("run")
        lease.renew()
        names = ("metrics.jsonl", "events.jsonl", "status.json")
        left.update({name: (run.path / name).read_bytes() for name in names if (run.path / name).exists()})
        await asyncio.wait_for(scene.stop.wait(), PATIENCE_S)
        taken.extend((before, await board.status("run")))  # `silent_s` is measured at each reading
        await board.close()

    with pytest.raises(LeaseLostError, match="run 'run' was taken over by process 7 on elsewhere"):
        go(config(iterations=500, checkpoint={"every": 1000}), tmp_path / "run", beside=take_over, slow_s=0.1)
    assert taken[0] and taken[1]
    kept = [status.model_dump(exclude={"silent_s"}) for status in taken if status]
    assert kept[0] == kept[1], "nothing was published over the new owner"
    assert {name: (tmp_path / "run" / name).read_bytes() for name in left} == left
    client = Redis.from_url(f"unix://{tmp_path / 'r.sock'}", decode_responses=True)
    assert json.loads(client.get("flowcredit:run:run:lease"))["host"] == "elsewhere"


def test_a_lease_that_waits_for_its_board_is_a_condition(config, tmp_path, redis, monkeypatch):
    monkeypatch.setenv("FLOWCREDIT_BOARD", f"unix://{tmp_path / 'r.sock'}")
    monkeypatch.setattr("deploy.board.lease.BoardLease.renew_s", 0.1)
    said: list[str] = []

    async def look(scene: Scene) -> None:
        def lease() -> str:
            held = {c.type: c.reason for c in scene.observed.reporter.status().conditions}
            return held.get("BoardLease", "")

        async def is_away() -> bool:
            return lease() == "Away"

        async def is_held() -> bool:
            return lease() == "Held"

        await until(is_away)
        said.append("away")
        redis()
        await until(is_held)
        said.append("held")
        scene.stop.set()

    go(config(iterations=500), tmp_path / "run", beside=look, slow_s=0.1)
    assert said == ["away", "held"]
    assert left_behind(tmp_path / "run").phase == "stopped"


def test_iterations_that_a_failed_learner_costs_are_shown_again_from_the_checkpoint_on(config, tmp_path):
    async def lose(scene: Scene) -> None:
        await until(lambda: comes_to(scene, 3))
        await scene.outcome(await scene.ask("pause"))  # no further line comes meanwhile
        board = Board((scene.run.path / BOARD_URL).read_text())

        async def holds(count: int) -> bool:
            with contextlib.suppress(BoardError):
                return len(await board.lines("run", since=0, limit=99)) == count
            return False

        await until(lambda: holds(scene.observed.reporter.status().lines))
        before = scene.observed.reporter.session
        scene.observed.reporter.rewind(scene.run.lines()[:2])
        assert scene.observed.reporter.session != before
        assert scene.observed.reporter.status().iteration == 1
        await until(lambda: holds(2))
        await board.close()
        scene.stop.set()

    go(config(iterations=50), tmp_path / "run", beside=lose)


def test_a_resumed_run_counts_its_lines_on(config, tmp_path):
    settings = config(iterations=3)
    go(settings, tmp_path / "run")
    run = open_run_folder(tmp_path / "run", settings)

    async def look() -> list[int]:
        async with Observed(run, LocalFleet(settings), RunJournal(run, Progress()), asyncio.Event()) as observed:
            return [line.seq for line in observed.reporter.buffers.lines]

    assert asyncio.run(look()) == [1, 2, 3, 4, 5]
    run.close()


def test_a_status_that_cannot_be_composed_does_not_hide_why_the_run_ended(config, tmp_path, monkeypatch):
    settings = config(iterations=3)
    run, fleet = open_run_folder(tmp_path / "run", settings), LocalFleet(settings)

    async def fail() -> None:
        async with Observed(run, fleet, RunJournal(run, Progress()), asyncio.Event()):
            monkeypatch.setattr(fleet, "actors", lambda: [][0])
            raise RuntimeError("the reason")

    with pytest.raises(RuntimeError, match="the reason"):
        asyncio.run(fail())
    run.close()


@pytest.mark.whole
@pytest.mark.ray
def test_a_run_whose_pools_and_learner_are_scaled_ends_in_the_weights_of_one_that_never_was(config, tmp_path):
    from actors.fleet import RayFleet
    from tests.support.services.local_ray import local_ray

    async def steer(scene: Scene) -> None:
        for pool, count in (("rollout", 3), ("rollout", 2), ("learner", 2)):
            await scene.ask("pause")  # a busy machine starts actors late: the run must not end meanwhile
            command = await scene.ask("scale", pool=pool, count=count)
            assert await scene.outcome(command) == ("done", f"{pool} has {count} actors")
            await scene.ask("resume")
            before = scene.observed.reporter.status().iteration
            await until(lambda: comes_to(scene, before + 2))  # noqa: B023
        refused = await scene.ask("scale", pool="learner", count=3)
        state, message = await scene.outcome(refused)
        assert state == "failed"
        assert "must divide learner.lanes 8, got 3" in message
        kinds = [actor.kind for actor in scene.observed.reporter.status().actors]
        assert kinds == ["learner", "learner", "rollout", "rollout", "reward/redness"]

    settings = config(iterations=16, cluster={"rollout_actors": 1})
    with local_ray(cpus=8):
        scaled = go(settings, tmp_path / "scaled", beside=steer, slow_s=0.3, make_fleet=RayFleet)
    assert scaled == go(settings, tmp_path / "plain")
    status = left_behind(tmp_path / "scaled")
    assert [(pool.name, pool.desired, pool.restarts) for pool in status.pools] == [
        ("rollout", 2, 0),
        ("reward/redness", 1, 0),
        ("learner", 2, 0),
    ]
    assert status.queues == {"groups/in_work": 0, "groups/scored": 0, "images/redness": 0}
    assert status.desired_sizes == {"rollout": 2, "learner": 2}
    digests = {actor.adapter_digest for actor in status.actors if actor.kind in ("learner", "rollout")}
    assert digests == {scaled[:12]}
