"""The board against real servers: the embedded Valkey and, where it is installed, Debian's Redis."""

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from deploy.board.board import COMMANDS_KEPT, LINES_KEPT, Board, Update
from deploy.board.child import Child
from deploy.board.embedded import BOARD_SOCKET, BOARD_URL, BoardServer
from deploy.board.publisher import LINES_BUFFERED, Buffers, Publisher
from deploy.monitor.health import Pulse
from learner.loop.stopping import end_all
from protocol.commands import Command, new_command
from protocol.errors import BoardError, DamagedError
from protocol.status import Event, MetricLine, RunStatus, TrajectoryRecord
from tests.support.pairwise import pairwise
from tests.support.paths import ROOT
from tests.support.services.boards import KINDS, answering, board_of, end_server
from tests.support.waiting import PATIENCE_S, until, wait_until

KEEP_S = 3600.0


def status(run: str = "mine", session: str = "s1", **changes) -> RunStatus:
    facts = {"phase": "running", "iteration": 1, "iterations": 5, "started": 1.0, "updated": time.time()}
    return RunStatus(run=run, session=session, **(facts | changes))


def line(seq: int) -> MetricLine:
    return MetricLine(seq=seq, values={"iteration": seq, "reward/mean": 0.5})


def record(iteration: int) -> TrajectoryRecord:
    return TrajectoryRecord(
        iteration=iteration, prompt="a red circle", steps=[0], width=1, height=1, trajectories=[], png=""
    )


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with board_of(request.param, tmp_path_factory.mktemp("board")) as found:
        yield found


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}:"


async def test_what_a_run_writes_is_read_back(url, prefix):
    board = Board(url, prefix=prefix)
    await answering(board)
    held = await board.newest("mine")
    assert (held.session, held.line, held.event, held.trajectories) == (None, 0, 0, set())
    event = Event(number=1, time=2.0, kind="info", message="begins")
    wrote = status(trajectories=[3])
    await board.write(Update(wrote, [line(1), line(2)], [event], [record(3)]), keep_s=KEEP_S)
    quiet = {"silent_s": None}
    assert (await known(board)).model_copy(update=quiet) == wrote
    assert [held.model_copy(update=quiet) for held in await board.runs()] == [wrote]
    assert await board.lines("mine", since=1, limit=10) == [line(2)]
    assert await board.events("mine", since=0, limit=10) == [event]
    assert await board.record("mine", 3) == record(3)
    assert await board.record("mine", 4) is None
    assert await board.status("other") is None
    held = await board.newest("mine")
    assert (held.session, held.line, held.event, held.trajectories) == ("s1", 2, 1, {3})
    await board.close()


async def test_writing_the_same_twice_changes_nothing_and_a_rewrite_begins_anew(url, prefix):
    board = Board(url, prefix=prefix)
    await answering(board)
    for _ in range(2):
        await board.write(Update(status(), [line(1), line(2)]), keep_s=KEEP_S)
    assert [held.seq for held in await board.lines("mine", since=0, limit=10)] == [1, 2]
    await board.write(Update(status(session="s2"), [line(1)], is_rewrite=True), keep_s=KEEP_S)
    assert [held.seq for held in await board.lines("mine", since=0, limit=10)] == [1]
    await board.close()


async def test_streams_are_capped_and_everything_of_a_run_expires(url, prefix):
    board = Board(url, prefix=prefix)
    await answering(board)
    for start in range(1, LINES_KEPT + 1001, 1000):
        await board.write(Update(status(), [line(seq) for seq in range(start, start + 1000)]), keep_s=KEEP_S)
    client = Redis.from_url(url, decode_responses=True)
    assert await client.xlen(f"{prefix}run:mine:metrics") <= LINES_KEPT + 200
    await board.send("mine", new_command("pause"))
    await board.write(Update(status(trajectories=[1]), [], [], [record(1)]), keep_s=KEEP_S)
    async for key in client.scan_iter(f"{prefix}run:*"):
        assert 0 < await client.ttl(key) <= KEEP_S, key
    await board.write(Update(status(run="old")), keep_s=KEEP_S)
    await client.delete(f"{prefix}run:old:status")
    assert [held.run for held in await board.runs()] == ["mine"]
    await board.prune()
    assert await client.zrange(f"{prefix}runs", 0, -1) == ["mine"]
    await client.aclose()
    await board.close()


async def test_a_command_waits_until_its_outcome_is_written(url, prefix):
    board = Board(url, prefix=prefix)
    await answering(board)
    command = new_command("scale", pool="rollout", count=3)
    await board.send("mine", command)
    assert (await board.write(Update(status()), keep_s=KEEP_S)).asked == [command]
    working = command.model_copy(update={"state": "working"})
    assert (await board.write(Update(status(), commands=[working]), keep_s=KEEP_S)).asked == [working]
    done = command.model_copy(update={"state": "done", "finished": 5.0})
    assert (await board.write(Update(status(), commands=[done]), keep_s=KEEP_S)).asked == []
    assert await board.command("mine", command.id) == done
    for _ in range(50):
        await board.send("mine", new_command("pause"))
    with pytest.raises(BoardError, match="at most 50 commands may wait"):
        await board.send("mine", new_command("pause"))
    await board.close()


LATER = status().model_dump_json().replace('"schema_version":1', '"schema_version":9')


UNREADABLE = (
    (LATER, "schema_version 9"),
    ('{"schema_version": 1, "phase": "dreaming"}', "run: "),
    (b"\xff\xfe", "Expecting value"),
    ("[" * 100_000, "recursion"),
    ("null", "valid dictionary"),
    (status(run="other").model_dump_json(), "run 'other'"),
    ({"another": "type"}, "WRONGTYPE"),
)


async def test_a_status_that_cannot_be_read_fails_alone_and_says_why(url, prefix):
    board = Board(url, prefix=prefix)
    await answering(board)
    for run in ("mine", "sound"):
        await board.write(Update(status(run)), keep_s=KEEP_S)
    client = Redis.from_url(url)
    for value, reason in UNREADABLE:
        await put(client, f"{prefix}run:mine:status", value)
        with pytest.raises(DamagedError, match=re.escape(reason)) as refused:
            await board.status("mine")
        assert "\n" not in str(refused.value)
        assert [held.run for held in await board.runs()] == ["sound"]
    await client.aclose()
    await board.close()


async def put(client: Redis, key: str, value: str | bytes | dict[str, str]) -> None:
    """Replace whatever a key holds; no publisher comes between."""
    async with client.pipeline(transaction=True) as both:
        both.delete(key)
        if isinstance(value, dict):
            both.hset(key, mapping=value)
        else:
            both.set(key, value)
        await both.execute()


async def known(board: Board) -> RunStatus:
    found = await board.status("mine")
    assert found is not None
    return found


@pytest.mark.parametrize("ahead_s", [-30.0, 3600.0])
async def test_silence_is_measured_by_the_board_whatever_the_writer_s_clock_says(url, prefix, ahead_s):
    board = Board(url, prefix=prefix)
    await answering(board)
    await board.write(Update(status(updated=time.time() + ahead_s)), keep_s=KEEP_S)
    assert Pulse().marked(await known(board)).stale_since is None
    client = Redis.from_url(url)
    await client.pexpire(f"{prefix}run:mine:heard", int(KEEP_S * 1000) - 12_000)
    await client.aclose()
    (listed,) = await board.runs()
    for found in (await known(board), listed):
        assert found.silent_s == pytest.approx(12.0, abs=5.0)
        since = Pulse().marked(found).stale_since
        assert since is not None and since < time.time() - 10
    await board.close()


PARTS = ("status", "heard", "session", "metrics", "events", "trajectories", "commands", "queue")


@pytest.mark.parametrize(
    ("url", "part", "value"),
    pairwise(url=KINDS, part=[*PARTS, "runs"], value=[b"\xff", {"a": "hash"}]),
    indirect=["url"],
)
async def test_publishing_heals_whatever_stands_there_instead(url, prefix, part, value):
    board, client, story = Board(url, prefix=prefix), Redis.from_url(url), Story(lines=3)
    story.buffers.add_record(record(3))
    await answering(board)
    publisher = asyncio.create_task(story.publisher(Board(url, prefix=prefix)).run())

    async def is_whole() -> bool:
        try:
            seqs = [held.seq for held in await board.lines("mine", since=0, limit=99)]
            runs = [held.run for held in await board.runs()]
            return (seqs, runs, await board.record("mine", 3)) == ([1, 2, 3], ["mine"], record(3))
        except BoardError:
            return False

    await until(is_whole)
    await put(client, f"{prefix}runs" if part == "runs" else f"{prefix}run:mine:{part}", value)
    command = new_command("pause")

    async def is_asked() -> bool:
        with contextlib.suppress(BoardError):
            if await board.command("mine", command.id) is None:
                await board.send("mine", command)
        return command in story.asked

    await until(is_asked)
    await until(is_whole)
    await until(story.is_in_contact)
    await end_all([publisher])
    await client.aclose()
    await board.close()


async def test_publishing_heals_foreign_entries_and_a_memory_that_was_emptied(url, prefix):
    board, client, story = Board(url, prefix=prefix), Redis.from_url(url), Story(lines=3)
    await answering(board)
    publisher = asyncio.create_task(story.publisher(Board(url, prefix=prefix)).run())

    async def has(count: int) -> bool:
        return [held.seq for held in await board.lines("mine", since=0, limit=99)] == list(range(1, count + 1))

    async def is_clean() -> bool:
        return await client.llen(f"{prefix}run:mine:queue") == 0  # pyright: ignore[reportGeneralTypeIssues]

    await until(lambda: has(3))
    await client.xadd(f"{prefix}run:mine:metrics", {"foreign": "entry"}, id="99-0")
    await client.hset(f"{prefix}run:mine:trajectories", "x", "y")  # pyright: ignore[reportGeneralTypeIssues]
    await client.hset(f"{prefix}run:mine:commands", "f", '{"kind": "scale"}')  # pyright: ignore[reportGeneralTypeIssues]
    await client.rpush(f"{prefix}run:mine:queue", b"\xff\xfe", "unknown", "f")  # pyright: ignore[reportGeneralTypeIssues]
    story.buffers.lines.append(line(4))
    await until(lambda: has(4))
    await until(is_clean)
    async for key in client.scan_iter(f"{prefix}*"):
        await client.delete(key)
    await until(lambda: has(4))
    story.buffers.lines.append(line(5))
    await until(lambda: has(5))
    await client.delete(f"{prefix}run:mine:metrics")
    await until(lambda: has(5))
    await end_all([publisher])
    assert story.asked == []
    await client.aclose()
    await board.close()


class Story:
    """A run as the publisher sees it."""

    def __init__(self, lines: int = 0) -> None:
        self.buffers = Buffers()
        self.buffers.lines.extend(line(seq) for seq in range(1, lines + 1))
        self.session = "s1"
        self.asked: list[Command] = []
        self.on_command: Callable[[Command], None] = self.asked.append
        self.left_over: list[Command] = []
        self.contacts: list[str] = ["not tried yet"]

    def is_in_contact(self) -> bool:
        """A moment after what was written is seen: the publisher tells it after a second exchange."""
        return self.contacts[-1] == ""

    def status(self) -> RunStatus:
        held = self.buffers
        return status(
            session=self.session, heartbeat_s=0.05, lines=len(held.lines), trajectories=list(held.trajectories)
        )

    def publisher(self, board: Board) -> Publisher:
        return Publisher(
            board,
            self.buffers,
            compose=self.status,
            on_command=lambda command: self.on_command(command),
            on_leftover=self.left_over.append,
            on_contact=self.contacts.append,
            keep_s=KEEP_S,
        )


async def has_noticed(story: Story) -> bool:
    return "does not answer" in story.contacts[-1]


async def test_a_board_that_went_away_holds_the_whole_stream_again(tmp_path):
    """The server loses everything it held; the publisher writes it again and then goes on."""
    server = BoardServer(tmp_path)
    server.start()
    story = Story(lines=3)
    task = asyncio.create_task(story.publisher(Board(server.url)).run())
    reader = Board(server.url)

    async def seqs(count: int) -> bool:
        try:
            return [held.seq for held in await reader.lines("mine", since=0, limit=99)] == list(range(1, count + 1))
        except BoardError:
            return False

    await until(lambda: seqs(3))
    await end_server(server.url)
    story.buffers.lines.extend([line(4), line(5)])
    await until(lambda: has_noticed(story))
    server.start()
    await until(lambda: seqs(5))
    story.buffers.lines.append(line(6))
    await until(lambda: seqs(6))
    await until(story.is_in_contact)
    task.cancel()
    await reader.close()
    server.stop()


async def test_a_board_that_lost_many_lines_gets_the_earlier_ones_from_the_run_folder(url, prefix):
    """Memory holds only the newest lines."""
    count = LINES_BUFFERED + 50
    asked: list[tuple[int, int]] = []

    def earlier(since: int, limit: int) -> list[MetricLine]:
        asked.append((since, limit))
        return [line(seq) for seq in range(since + 1, since + limit + 1)]

    story, board, client = Story(), Board(url, prefix=prefix), Redis.from_url(url)
    await answering(board)
    story.buffers = Buffers(earlier)
    story.buffers.lines.extend(line(seq) for seq in range(1, count + 1))
    task = asyncio.create_task(story.publisher(Board(url, prefix=prefix)).run())

    async def has(last: int) -> bool:
        return [held.seq for held in await board.lines("mine", since=0, limit=999)] == list(range(1, last + 1))

    await until(lambda: has(count))
    assert asked == [(0, 50)]
    story.buffers.lines.append(line(count + 1))
    await until(lambda: has(count + 1))
    assert asked == [(0, 50)], "the board lacked only a line that memory holds"
    await client.delete(f"{prefix}run:mine:metrics")
    await until(lambda: has(count + 1))
    await end_all([task])
    await client.aclose()
    await board.close()


def test_a_board_gets_no_more_lines_than_it_keeps():
    def earlier(since: int, limit: int) -> list[MetricLine]:
        return [line(seq) for seq in range(since + 1, since + limit + 1)]

    buffers = Buffers(earlier)
    buffers.lines.extend(line(seq) for seq in range(LINES_KEPT, LINES_KEPT + 200))
    held = asyncio.run(buffers.lines_after(0))
    assert [each.seq for each in held] == list(range(200, LINES_KEPT + 200))
    assert asyncio.run(buffers.lines_after(LINES_KEPT + 199)) == []


async def test_a_new_process_of_a_run_replaces_what_the_earlier_one_left(tmp_path):
    server = BoardServer(tmp_path)
    server.start()
    board = Board(server.url)
    await answering(board)
    await board.write(Update(status(session="old"), [line(seq) for seq in range(1, 9)]), keep_s=KEEP_S)
    command = new_command("pause")
    await board.send("mine", command)
    story = Story(lines=4)
    await story.publisher(Board(server.url)).finish()
    assert [held.seq for held in await board.lines("mine", since=0, limit=99)] == [1, 2, 3, 4]
    assert (story.asked, story.left_over) == ([], [command]), "it was meant for the earlier process"
    await board.close()
    server.stop()


async def test_a_command_that_comes_too_late_gets_an_outcome(tmp_path):
    """The run has ended; what its last write finds on the board is refused, and the board shows it."""
    server = BoardServer(tmp_path)
    server.start()
    board = Board(server.url)
    await answering(board)
    story, command = Story(), new_command("pause")
    publisher = story.publisher(Board(server.url))
    task = asyncio.create_task(publisher.run())

    async def is_there() -> bool:
        return await board.status("mine") is not None

    await until(is_there)
    await end_all([task])
    await board.send("mine", command)

    def refuse(asked: Command) -> None:
        story.buffers.commands[asked.id] = asked.model_copy(update={"state": "failed"})

    story.on_command = refuse
    await publisher.finish()
    held = await board.command("mine", command.id)
    await board.close()
    server.stop()
    assert held is not None and held.state == "failed"


async def test_outcomes_of_old_commands_are_dropped(tmp_path):
    server = BoardServer(tmp_path)
    server.start()
    board = Board(server.url)
    await answering(board)
    story = Story()
    for number in range(COMMANDS_KEPT + 20):
        command = new_command("pause").model_copy(update={"state": "done", "finished": float(number)})
        story.buffers.commands[command.id] = command
    await story.publisher(Board(server.url)).finish()
    assert len(story.buffers.commands) == COMMANDS_KEPT
    client = Redis.from_url(server.url)
    assert await client.hlen("flowcredit:run:mine:commands") == COMMANDS_KEPT
    await client.aclose()
    await board.close()
    server.stop()


def test_the_embedded_server_is_private_and_leaves_nothing_behind(tmp_path):
    server = BoardServer(tmp_path)
    server.start()
    url = (tmp_path / BOARD_URL).read_text()
    asyncio.run(answering(Board(url)))
    assert (Path(url.removeprefix("unix://")).stat().st_mode & 0o777) == 0o700
    server.stop()
    assert not server.is_running()
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_server_of_a_deep_folder_finds_another_path_for_its_socket(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    server = BoardServer(deep)
    server.start()
    asyncio.run(answering(Board(server.url)))
    server.stop()
    assert list(deep.iterdir()) == []


def test_the_embedded_server_of_a_path_with_signs_of_an_address_is_found(tmp_path):
    folder = tmp_path / "a#b?c%41 d"
    folder.mkdir()
    server = BoardServer(folder)
    server.start()
    asyncio.run(answering(Board((folder / BOARD_URL).read_text())))
    server.stop()
    assert list(folder.iterdir()) == []


def test_an_embedded_server_that_was_taken_over_leaves_its_successor_alone(tmp_path):
    first, second = BoardServer(tmp_path), BoardServer(tmp_path)
    first.start()
    asyncio.run(answering(Board(first.url)))
    made = (tmp_path / BOARD_SOCKET).stat().st_mtime_ns
    second.start()

    async def replaced() -> bool:
        return (tmp_path / BOARD_SOCKET).exists() and (tmp_path / BOARD_SOCKET).stat().st_mtime_ns != made

    asyncio.run(until(replaced))
    asyncio.run(answering(Board(second.url)))
    first.stop(is_taken_over=True)
    assert not first.is_running()
    asyncio.run(answering(Board((tmp_path / BOARD_URL).read_text())))
    second.stop()
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_server_ends_with_the_process_that_started_it(tmp_path):
    script = (
        "import asyncio, os, signal, sys\nfrom pathlib import Path\nfrom deploy.board.embedded import BoardServer\n"
        "server = BoardServer(Path(sys.argv[1]))\nserver.start()\nprint(server.url, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    url = ended.stdout.strip()

    async def gone() -> bool:
        try:
            await Board(url).ping()
        except BoardError:
            return True
        return False

    asyncio.run(until(gone))


def test_a_child_that_was_stopped_ends_with_its_starter_too():
    script = (
        "import os, psutil, signal, time\nfrom deploy.board.child import Child\nChild(['sleep', '600'])\nfound = []\n"
        "while not found:\n    time.sleep(0.05)\n"
        "    found = [p for p in psutil.Process().children(recursive=True) if p.name() == 'sleep']\n"
        "found[0].suspend()\nprint(found[0].pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        process = psutil.Process(int(ended.stdout))
        assert process.name() == "sleep"
        psutil.wait_procs([process], timeout=PATIENCE_S)
        assert not process.is_running()


def test_a_child_that_is_stopped_while_it_starts_has_ended_when_stop_returns(tmp_path):
    program = tmp_path / "sleeps"
    program.symlink_to("/bin/sleep")
    for number in range(12):
        child = Child([str(program), "600"])
        time.sleep(number * 2e-4)
        child.stop()
        assert not [
            each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [""])[0] == str(program)
        ]


def test_the_group_of_a_child_that_has_ended_is_not_killed(monkeypatch):
    """Its number may be that of another group by now."""
    child, killed = Child(["true"]), []
    wait_until(lambda: not child.is_running())
    monkeypatch.setattr("os.killpg", lambda *group: killed.append(group))
    child.kill()
    assert not killed


async def test_a_board_whose_memory_is_full_says_so_and_holds_everything_once_there_is_room(tmp_path):
    server = BoardServer(tmp_path)
    server.start()
    board, client, story = Board(server.url), Redis.from_url(server.url), Story(lines=3)
    await answering(board)
    publisher = asyncio.create_task(story.publisher(Board(server.url)).run())

    async def has(count: int) -> bool:
        return [held.seq for held in await board.lines("mine", since=0, limit=99)] == list(range(1, count + 1))

    async def is_full() -> bool:
        return "its memory is full: raise its maxmemory" in story.contacts[-1]

    await until(lambda: has(3))
    await client.config_set("maxmemory", "1")
    story.buffers.lines.extend([line(4), line(5)])
    await until(is_full)
    with pytest.raises(BoardError, match="its memory is full"):
        await board.send("mine", new_command("pause"))
    assert await has(3), "nothing is half written, and what was there stays"
    await client.config_set("maxmemory", "0")
    await until(lambda: has(5))
    await until(story.is_in_contact)
    await end_all([publisher])
    await client.aclose()
    await board.close()
    server.stop()


async def test_commands_of_two_users_at_once_all_arrive_and_each_one_once(url, prefix):
    users, story = [Board(url, prefix=prefix, timeout_s=60) for _ in range(2)], Story()
    await answering(users[0])
    publisher = asyncio.create_task(story.publisher(Board(url, prefix=prefix)).run())

    async def is_there() -> bool:
        return await users[0].status("mine") is not None

    def carry_out(command: Command) -> None:
        story.asked.append(command)
        story.buffers.commands[command.id] = command.model_copy(update={"state": "done"})

    story.on_command = carry_out
    await until(is_there)
    commands = [new_command("scale", pool="rollout", count=count) for count in range(1, 41)]
    await asyncio.gather(*(users[command.count % 2].send("mine", command) for command in commands if command.count))

    async def all_done() -> bool:
        found = [await users[0].command("mine", command.id) for command in commands]
        return all(command and command.state == "done" for command in found)

    await until(all_done)
    await end_all([publisher])
    for user in users:
        await user.close()
    assert sorted(command.count or 0 for command in story.asked) == list(range(1, 41))
