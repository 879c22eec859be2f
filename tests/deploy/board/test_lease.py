"""One driver a run on a board: refusals, takeovers, expiry and what a lost lease still writes, against real servers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from deploy.board import lease as leases
from deploy.board.board import Board, FencedOutError, Update
from deploy.board.embedded import server_program
from deploy.board.lease import BoardLease
from deploy.folder.lease import Lease
from deploy.folder.run_folder import open_run_folder
from protocol.errors import LeaseLostError, RunFolderError
from protocol.status import MetricLine, RunStatus
from tests.support.paths import ROOT
from tests.support.services.boards import answers
from tests.support.waiting import wait_until

KEEP_S = 3600.0


def status(iteration: int) -> RunStatus:
    return RunStatus(
        run="mine",
        session="s",
        phase="running",
        iteration=iteration,
        iterations=5,
        started=1.0,
        updated=time.time(),
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that lives for a minute and is renewed all the time; a test ends it sooner on the board itself."""
    monkeypatch.setattr(leases, "TTL_S", 60.0)
    monkeypatch.setattr(BoardLease, "renew_s", 0.1)
    monkeypatch.setattr(leases, "POLL_S", 0.1)


@pytest.fixture
def redis(board_url: str) -> Iterator[Any]:
    """A client of the board, which is empty and answers."""
    client = Redis.from_url(board_url, decode_responses=True)
    wait_until(lambda: answers(client))
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def a_minute_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Put this process's clock ahead by more than a lease lives."""
    clock = time.monotonic
    return lambda: monkeypatch.setattr(leases.time, "monotonic", lambda: clock() + 61)


class Asleep(BoardLease):
    """The lease of a process that is stopped."""

    renew_s = 3600.0


Take = Callable[..., BoardLease]


@pytest.fixture
def take(board_url: str, tmp_path: Path) -> Iterator[Take]:
    """`take("a")`: the lease of a run that works in folder `a`.

    With `is_asleep`, it is the lease of a process that is stopped; with `say`, what the wait for another holder calls.
    """
    held: list[BoardLease] = []
    under: dict[str, Lease] = {}

    def make(
        folder: str,
        *,
        url: str = board_url,
        run: str = "mine",
        is_asleep: bool = False,
        say: Callable[[str], None] = lambda _: None,
        **how: Any,
    ) -> BoardLease:
        if folder not in under:
            (tmp_path / folder).mkdir()
            under[folder] = Lease.take(tmp_path / folder)
        lease = (Asleep if is_asleep else BoardLease)(url, run=run, under=under[folder], keep_s=KEEP_S, **how)
        lease.take(say)
        held.append(lease)
        return lease

    yield make
    for lease in held:
        lease.release()
    for folder in under.values():
        folder.release()


def ending(redis: Any, lease: BoardLease) -> Callable[[str], None]:
    """For `say`: the board ends this lease as soon as somebody waits for it, as it does when its time is over."""

    def end(_: str) -> None:
        redis.pexpire(lease.fence.key, 1)

    return end


def test_a_lease_lives_a_while_is_renewed_and_is_gone_when_it_is_released(redis, take):
    lease = take("a")
    assert (lease.tokens, lease.trouble) == ((1,), "")
    holder = json.loads(redis.get("flowcredit:run:mine:lease"))
    assert holder["pid"] == os.getpid()
    assert 0 < redis.pttl("flowcredit:run:mine:lease") <= 60_000
    assert 0 < redis.ttl("flowcredit:run:mine:lease:token") <= KEEP_S
    redis.pexpire("flowcredit:run:mine:lease", 30_000)
    wait_until(lambda: redis.pttl("flowcredit:run:mine:lease") > 30_000)
    lease.require()
    lease.release()
    assert redis.get("flowcredit:run:mine:lease") is None
    assert take("b").tokens == (2,)


def test_a_second_driver_of_the_name_is_refused_although_it_has_a_folder_of_its_own(redis, take):
    first = take("a")
    began = time.monotonic()
    with pytest.raises(
        RunFolderError, match=rf"run 'mine' is in use by process {os.getpid()} on .*: end it, or set"
    ) as refused:
        take("b")
    assert time.monotonic() - began < leases.TTL_S, "at its first sign of life, not when its time is over"
    assert "secret-word" not in str(refused.value)
    time.sleep(0.3)
    first.require()
    assert first.tokens == (1,)
    assert take("other", run="other").tokens == (1,)


def test_a_second_driver_with_the_same_checkpoint_url_is_refused_under_any_name(redis, take):
    first = take("a", copies="s3://bucket/run")
    with pytest.raises(RunFolderError, match=r"checkpoint.url s3://bucket/run is in use by process"):
        take("b", run="other", copies="s3://bucket/run")
    assert redis.get("flowcredit:run:other:lease") is None, "all or none"
    assert take("c", run="other", copies="s3://bucket/else").tokens == (1, 1)
    first.require()


def test_a_dead_driver_s_lease_is_taken_over_when_its_time_is_over_and_the_token_grows(redis, take, a_minute_later):
    dead, waits = take("a", is_asleep=True), []

    def time_is_over(text: str) -> None:
        waits.append((text, redis.pttl(dead.fence.key)))
        ending(redis, dead)(text)

    taker = take("b", say=time_is_over)
    ((text, left_ms),) = waits
    assert "waiting up to 60 s for a sign of life" in text and 0 < left_ms <= 60_000
    assert taker.tokens == (2,)
    a_minute_later()
    with pytest.raises(LeaseLostError, match="run 'mine' was taken over by process "):
        dead.require()
    taker.require()
    dead.release()
    assert json.loads(redis.get("flowcredit:run:mine:lease"))["id"] == json.loads(taker.fence.owner)["id"]


def test_who_goes_on_in_the_folder_of_a_dead_driver_need_not_wait(redis, take):
    dead = take("a", is_asleep=True)
    began = time.monotonic()
    taker = take("a")
    assert time.monotonic() - began < 20
    assert taker.tokens == (2,)
    dead.renew()
    with pytest.raises(LeaseLostError, match="was taken over"):
        dead.require()


def test_a_driver_that_slept_while_another_came_and_went_must_not_go_on(redis, take, a_minute_later):
    sleeper = take("a", is_asleep=True)
    taker = take("b", say=ending(redis, sleeper))
    taker.release()
    assert redis.get("flowcredit:run:mine:lease") is None
    a_minute_later()
    with pytest.raises(LeaseLostError, match="taken over by another process"):
        sleeper.require()
    assert redis.get("flowcredit:run:mine:lease") is None


def test_who_lost_the_folder_claims_nothing_on_the_board(redis, take, tmp_path):
    lease = take("a", is_asleep=True)
    (tmp_path / "a" / ".lease" / "token_000099").write_text('{"host": "elsewhere", "pid": 7}')
    redis.flushall()
    lease.renew()
    with pytest.raises(LeaseLostError, match="taken over by process 7 on elsewhere"):
        lease.require()
    assert redis.keys("*") == []


async def test_a_driver_whose_lease_is_lost_cannot_publish_over_the_new_one(redis, take, board_url):
    sleeper = take("a", is_asleep=True)
    taker = take("b", say=ending(redis, sleeper))
    board = Board(board_url)
    await board.write(Update(status(7)), keep_s=KEEP_S, fence=taker.fence)
    with pytest.raises(FencedOutError, match="does not hold the run's lease"):
        await board.write(Update(status(3)), keep_s=KEEP_S, fence=sleeper.fence)
    shown = await board.status("mine")
    await board.close()
    assert shown is not None
    assert shown.iteration == 7


class Interrupting(list[MetricLine]):
    """Lines of an update; something happens whenever they are read, which is while they are written."""

    def __init__(self, happens: Callable[[int], object]) -> None:
        super().__init__([MetricLine(seq=1, values={"iteration": 1})])
        self.happens = happens
        self.times = 0

    def __iter__(self) -> Iterator[MetricLine]:
        self.times += 1
        self.happens(self.times)
        return super().__iter__()


async def test_a_lease_that_changes_hands_during_a_write_voids_the_write(redis, board_url, take):
    lease = take("a")
    board = Board(board_url)
    await board.write(Update(status(1)), keep_s=KEEP_S, fence=lease.fence)
    overtaken = Interrupting(lambda _: redis.set("flowcredit:run:mine:lease", "somebody else"))
    with pytest.raises(FencedOutError):
        await board.write(Update(status(2), overtaken), keep_s=KEEP_S, fence=lease.fence)
    shown = await board.status("mine")
    await board.close()
    assert overtaken.times > 0
    assert shown is not None
    assert shown.iteration == 1


async def test_a_lease_that_is_renewed_during_a_write_does_not_void_it(redis, board_url, take):
    lease = take("a", is_asleep=True)
    board = Board(board_url)
    renewed = Interrupting(lambda times: lease.renew() if times == 1 else None)
    await board.write(Update(status(2), renewed), keep_s=KEEP_S, fence=lease.fence)
    await board.close()
    assert renewed.times == 2


@pytest.mark.parametrize("value", ["no json", b"\xff\xfe", "[1]", '{"pid": 7}', {"a": "hash"}])
def test_a_value_that_is_no_lease_is_nobody_s(redis, take, value):
    def put(key: str) -> None:
        redis.delete(key)
        redis.hset(key, mapping=value) if isinstance(value, dict) else redis.set(key, value)

    put("flowcredit:run:mine:lease")
    put("flowcredit:run:mine:lease:token")
    lease = take("a")
    assert lease.trouble == ""
    put("flowcredit:run:mine:lease")
    lease.renew()
    assert lease.trouble == ""
    assert redis.get("flowcredit:run:mine:lease") == lease.fence.owner
    lease.require()


class OwnServer:
    """A server that a test may kill and start again, empty."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder / 's.sock'}"
        self._words = [server_program(), "--port", "0", "--unixsocket", str(folder / "s.sock"), "--save", ""]
        self._folder = folder

    def start(self) -> None:
        self.process = subprocess.Popen(self._words, cwd=self._folder, stdout=subprocess.DEVNULL)
        client = Redis.from_url(self.url)
        wait_until(lambda: answers(client))
        client.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    one = OwnServer(tmp_path)
    one.start()
    yield one
    one.kill()


def test_a_board_that_is_away_at_the_start_is_taken_when_it_is_back(server, take):
    server.kill()
    lease = take("a", url=server.url)
    assert "does not answer" in lease.trouble
    lease.require()
    server.start()
    wait_until(lambda: not lease.trouble)
    assert lease.tokens == (1,)


def test_a_board_that_is_back_and_names_another_driver_ends_the_one_that_came_without_it(server, take):
    server.kill()
    late = take("a", url=server.url, is_asleep=True)
    server.start()
    first = take("b", url=server.url)
    late.renew()
    with pytest.raises(LeaseLostError, match="was taken over"):
        late.require()
    first.require()


def test_a_board_that_lost_its_memory_is_taken_again_with_a_token_that_still_grows(server, take):
    lease = take("a", url=server.url)
    server.kill()
    wait_until(lambda: bool(lease.trouble))
    lease.require()
    server.start()
    wait_until(lambda: not lease.trouble)
    assert lease.tokens == (2,)


def test_a_board_that_hangs_delays_no_write_for_long(server, take, monkeypatch):
    monkeypatch.setattr(leases, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(leases, "TTL_S", 2.0)
    lease = take("a", url=server.url)
    server.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: bool(lease.trouble))
    began = time.monotonic()
    for _ in range(100):
        lease.require()
    assert time.monotonic() - began < 10, "if each waited for the board, it would be 30 s"
    time.sleep(1.2 * leases.TTL_S)
    server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not lease.trouble)
    lease.require()


def test_of_many_processes_that_start_at_once_one_gets_the_lease(server, tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from deploy.board.lease import BoardLease\nfrom deploy.folder.lease import Lease\n"
        "folder = Path(sys.argv[1])\nfolder.mkdir()\nunder = Lease.take(folder)\nsys.stdin.readline()\n"
        "from protocol.errors import RunFolderError\n"
        "try:\n"
        "    BoardLease(sys.argv[2], run='mine', under=under, keep_s=60).take(lambda text: None)\n"
        "    print('held', flush=True)\n    sys.stdin.readline()\n"
        "except RunFolderError:\n    print('refused', flush=True)\n"
    )
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / str(number)), server.url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for driver in drivers:
        assert driver.stdin
        driver.stdin.write("go\n")
        driver.stdin.flush()
    said = sorted(driver.stdout.readline().strip() for driver in drivers if driver.stdout)
    for driver in drivers:
        driver.kill()
        driver.communicate()
    assert said == ["held", "refused", "refused"]


def test_a_run_that_is_refused_on_the_board_leaves_no_folder(server, tmp_path, tiny_config):
    config = tiny_config(status={"board": server.url})
    first = open_run_folder(tmp_path / "here" / "run", config)
    assert first.board_lease is not None
    with pytest.raises(RunFolderError, match="run 'run' is in use by process"):
        open_run_folder(tmp_path / "there" / "run", config)
    assert not (tmp_path / "there" / "run").exists()
    first.append({"iteration": 1})
    first.close()
    second = open_run_folder(tmp_path / "there" / "run", config)
    with pytest.raises(LeaseLostError):
        asleep_and_overtaken(second, server)
    second.close()


def asleep_and_overtaken(run: Any, server: OwnServer) -> None:
    lease = run.board_lease
    Redis.from_url(server.url).set(lease.fence.key, json.dumps({"host": "elsewhere", "pid": 7, "folder": "f"}))
    lease.renew()
    assert not run.is_writer()
    run.append({"iteration": 1})


def test_an_embedded_board_and_none_have_no_lease_beside_the_folder_s(tmp_path, tiny_config):
    for board in ("embedded", "off", "unix:///nowhere?db=x", "redis://nowhere?bogus=1"):
        run = open_run_folder(tmp_path / board[:8], tiny_config(status={"board": board}))
        assert run.board_lease is None, board
        run.close()
