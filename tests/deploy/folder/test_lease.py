"""One writer a run folder, also across machines: leases, takeovers and the fence."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from deploy.folder import lease as leases
from deploy.folder.lease import Lease
from deploy.folder.names import LEASE
from protocol.errors import LeaseLostError, RunFolderError
from tests.support.waiting import wait_until


def token_of(run: Path) -> tuple[str, dict]:
    (path,) = (run / LEASE).iterdir()
    return path.name, json.loads(path.read_text())


def pretend(run: Path, **facts) -> None:
    """A lease that somebody else wrote."""
    (run / LEASE).mkdir()
    (run / LEASE / "token_000004").write_text(json.dumps(facts))


def hold(run: Path, ready) -> None:
    lease = Lease.take(run)
    ready.set()
    time.sleep(600)
    lease.release()


def test_a_lease_names_its_holder_and_a_released_one_is_free_at_once(tmp_path):
    lease = Lease.take(tmp_path)
    name, facts = token_of(tmp_path)
    assert name == "token_000001"
    assert (facts["host"], facts["pid"], facts["is_released"]) == (socket.gethostname(), os.getpid(), False)
    lease.release()
    assert token_of(tmp_path)[1]["is_released"]
    began = time.monotonic()
    second = Lease.take(tmp_path, stale_s=60)
    assert time.monotonic() - began < 20
    assert token_of(tmp_path)[0] == "token_000002"
    second.release()


def test_a_holder_whose_folder_was_removed_leaves_the_run_that_began_there_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    first = Lease.take(run)
    shutil.rmtree(run)
    run.mkdir()
    second = Lease.take(run)
    own = token_of(run)
    with pytest.raises(LeaseLostError, match=rf"was removed, and process {os.getpid()} on .* has begun a run there"):
        first.require()
    first.release()
    assert token_of(run) == own
    second.require()
    second.release()


def test_a_second_process_on_this_machine_is_refused_and_takes_over_when_the_first_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(30)
    with pytest.raises(
        RunFolderError, match=rf"is in use by another process \({holder.pid} on {socket.gethostname()}\)"
    ):
        Lease.take(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    began = time.monotonic()
    lease = Lease.take(tmp_path, stale_s=60)
    assert time.monotonic() - began < 20
    assert token_of(tmp_path)[0] == "token_000002"
    lease.release()


def test_a_holder_elsewhere_that_beats_is_left_alone(tmp_path, monkeypatch):
    pretend(tmp_path, host="elsewhere", boot="b", pid=7, beats=0, is_released=False)
    monkeypatch.setattr(leases, "BEAT_S", 0.05)

    def beating(seconds: float) -> None:
        pretended = tmp_path / LEASE / "token_000004"
        pretended.write_text(json.dumps(json.loads(pretended.read_text()) | {"beats": 1}))

    monkeypatch.setattr(leases.time, "sleep", beating)
    said = []
    with pytest.raises(RunFolderError, match=r"is in use by another process \(7 on elsewhere\)"):
        Lease.take(tmp_path, stale_s=5, say=said.append)
    assert "waiting 5 s for a sign of life" in said[0]
    assert [path.name for path in (tmp_path / LEASE).iterdir()] == ["token_000004"]


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_holder_elsewhere_that_is_silent_is_taken_over_and_fenced_out(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 3600.0)
    with monkeypatch.context() as elsewhere:  # the lock of a process there keeps nobody out here
        elsewhere.setattr(fcntl, "flock", no_locks)
        elsewhere.setattr(leases.socket, "gethostname", lambda: "elsewhere")
        sleeper = Lease.take(tmp_path)
    monkeypatch.setattr(leases.socket, "gethostname", lambda: "here")
    sleeper.require()
    taker = Lease.take(tmp_path, stale_s=0.3, say=lambda text: None)
    taker.require()
    with pytest.raises(LeaseLostError, match="was taken over by process .* on here: this one was silent too long"):
        sleeper.require()
    taker.release()
    sleeper.release()


def test_of_two_who_want_the_same_token_one_gets_it(tmp_path, monkeypatch):
    pretend(tmp_path, host="elsewhere", boot="b", pid=7, beats=0, is_released=True)
    (tmp_path / LEASE / "token_000005").write_text(json.dumps({"host": "third", "pid": 9}))
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: (p for p in listed(folder) if p.name != "token_000005"))
    with pytest.raises(RunFolderError, match=r"in use by another process \(9 on third\)"):
        Lease.take(tmp_path)


def test_the_beats_count_up_without_a_new_file(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    lease = Lease.take(tmp_path)
    wait_until(lambda: token_of(tmp_path)[1]["beats"] >= 3)
    assert next((tmp_path / LEASE).iterdir()).stat().st_size == leases.WIDTH
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}"])
def test_a_token_whose_maker_died_before_it_wrote_is_taken_over_after_the_wait(tmp_path, content):
    (tmp_path / LEASE).mkdir()
    (tmp_path / LEASE / "token_000002").write_bytes(content)
    lease = Lease.take(tmp_path, stale_s=0.1, say=lambda text: None)
    assert token_of(tmp_path)[0] == "token_000003"
    lease.release()


def test_a_cleared_lease_leaves_nothing(tmp_path):
    lease = Lease.take(tmp_path)
    lease.clear()
    lease.release()
    assert list(tmp_path.iterdir()) == []
