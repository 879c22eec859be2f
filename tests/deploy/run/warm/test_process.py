"""The warm process: what a fork is, and when there is none."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.run.warm.client import fork, number_from
from deploy.run.warm.workers import HERE, start_process
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks after imports are for Linux")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Socket of the warm process."""
    address = tmp_path_factory.mktemp("warm") / "own" / "door"
    address.parent.mkdir()
    return address


@pytest.fixture(scope="module", autouse=True)
def process(address: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A warm process that has imported `colorsys`."""
    process = start_process(address, ("colorsys",), dict(os.environ))
    wait_until(address.exists)
    yield process
    assert process.stdin
    process.stdin.close()
    assert process.wait(30) == 0
    assert not address.parent.exists()


def asked(address: Path, *words: str, folder: Path, **variables: str) -> tuple[str, int, int]:
    """What a command wrote, the number of its process and its exit code."""
    ours, theirs = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    number, warm = fork(str(address), list(words), str(folder), variables, [nothing, theirs, theirs])
    os.close(nothing)
    os.close(theirs)
    with open(ours) as said, warm:
        return said.read(), number, number_from(warm)


def test_a_fork_has_the_imports_and_for_the_rest_is_the_command_alone(address: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "further.py").write_text("")
    (tmp_path / "command.py").write_text(
        "import os, sys\n"
        "print('colorsys' in sys.modules, sys.argv, os.getcwd(), dict(os.environ), os.getpid(), os.getpgrp())\n"
        "import beside, further\n"
        "print(__name__, file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    said, number, code = asked(
        address, str(tmp_path / "command.py"), "word", folder=tmp_path / "more", PYTHONPATH=str(tmp_path / "more")
    )
    environment = {"PYTHONPATH": str(tmp_path / "more")}
    arguments = [str(tmp_path / "command.py"), "word"]
    assert set(said.splitlines()) == {
        f"True {arguments} {tmp_path / 'more'} {environment} {number} {number}",
        "__main__",
    }
    assert code == 3


def test_commands_of_each_form(address: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:], __name__)")
    assert asked(address, "-m", "mine", "a", folder=tmp_path)[0] == "['a'] __main__\n"
    assert asked(address, "-u", "-c", "import mine, sys; print(sys.argv)", "b", folder=tmp_path)[0].endswith(
        "['-c', 'b']\n"
    )


def test_a_fork_inherits_from_the_asker_what_a_new_process_would(address: Path, tmp_path: Path) -> None:
    """Ray raises the number of files, blocks SIGINT, and wants the system to kill a worker before anything else."""
    (tmp_path / "about.py").write_text(
        "import resource, signal\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE), signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
        "print(open('/proc/self/oom_score_adj').read().strip(), signal.getsignal(signal.SIGINT).__name__)\n"
    )
    words = [sys.executable, "-S", "-E", str(HERE / "start.py"), str(address), str(tmp_path / "about.py")]
    inherited = "import os, resource, signal, sys, time\nresource.setrlimit(resource.RLIMIT_NOFILE, (77, 99))\n"
    inherited += "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    inherited += f"open('/proc/self/oom_score_adj', 'w').write('700')\nos.execv({words[0]!r}, {words!r})"
    said = subprocess.run([sys.executable, "-c", inherited], capture_output=True, text=True, check=True).stdout
    blocked = {signal.SIGUSR1}
    assert said == f"(77, 99) {blocked}\n700 default_int_handler\n"


def test_a_fork_s_end_by_a_signal_is_told_and_harms_no_other(address: Path, tmp_path: Path) -> None:
    """Ray kills the whole group of a worker that has ended."""
    nothing = os.open(os.devnull, os.O_RDWR)
    forks = [
        fork(str(address), ["-c", "import time; time.sleep(60)"], str(tmp_path), {}, [nothing] * 3) for _ in range(2)
    ]
    os.close(nothing)
    (first, told), (second, other) = forks
    wait_until(lambda: os.getpgid(first) == first and os.getpgid(second) == second)
    os.killpg(first, signal.SIGKILL)
    assert number_from(told) == -signal.SIGKILL
    assert psutil.pid_exists(second)
    os.kill(second, signal.SIGTERM)
    assert number_from(other) == -signal.SIGTERM
    told.close()
    other.close()


def test_no_process_for_one_who_has_gone(address: Path, process: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    """Ray starts a worker again when its start took too long; both would be the same worker."""
    trace = tmp_path / "trace"
    words = ["-c", f"open({str(trace)!r}, 'w')"]
    command = json.dumps({"words": words, "folder": "/", "variables": {}, "inherited": {}}).encode()
    process.send_signal(signal.SIGSTOP)  # it is busy with another
    for is_whole in (True, False):
        nothing = os.open(os.devnull, os.O_RDWR)
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(address))
            streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [nothing] * 3))]
            gone.sendmsg([len(command).to_bytes(8, "big")], streams)
            gone.sendall(command if is_whole else command[:5])
        os.close(nothing)
    process.send_signal(signal.SIGCONT)
    assert asked(address, "-c", "print(1)", folder=tmp_path)[0] == "1\n"
    assert not trace.exists()


def test_one_who_says_half_of_it_keeps_others_waiting_for_a_while_only(address: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(address))
        assert asked(address, "-c", "print(1)", folder=tmp_path)[0] == "1\n"


def test_a_command_may_come_before_the_imports_are_done(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import time; time.sleep(1)")
    address = tmp_path / "own" / "door"
    address.parent.mkdir()
    process = start_process(address, ("late",), os.environ | {"PYTHONPATH": str(tmp_path)})
    wait_until(address.exists)
    said, _, code = asked(address, "-c", "import sys; print('late' in sys.modules)", folder=tmp_path)
    assert (said, code) == ("True\n", 0)
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "module",
    [
        None,
        "import time; time.sleep(1); raise ImportError",
        "import os; os._exit(1)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ],
)
def test_without_a_warm_process_that_can_fork_a_worker_starts_as_it_always_does(
    tmp_path: Path, module: str | None
) -> None:
    (tmp_path / "worker.py").write_text("import sys; print(sys.argv[1:])")
    address = tmp_path / "own" / "door"
    address.parent.mkdir()
    start = [sys.executable, "-S", "-E", HERE / "start.py", address, tmp_path / "worker.py", "a"]
    if module:
        (tmp_path / "imported.py").write_text(module)
        process = start_process(address, ("imported",), os.environ | {"PYTHONPATH": str(tmp_path)})
        wait_until(address.exists)
    assert subprocess.run(start, capture_output=True, text=True, check=True).stdout == "['a']\n"
    if module and "_exit" not in module:
        assert process.poll() is None
        process.communicate()
        assert not address.parent.exists()


def test_a_worker_does_not_wait_for_imports_without_end(tmp_path: Path) -> None:
    """And gets no second process when they have ended."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(2)")
    address = tmp_path / "own" / "door"
    address.parent.mkdir()
    process = start_process(address, ("slow",), os.environ | {"PYTHONPATH": str(tmp_path)})
    wait_until(address.exists)
    nothing = os.open(os.devnull, os.O_RDWR)
    command = ["-c", "open('late', 'w')"]
    with pytest.raises(OSError, match="timed out"):
        fork(str(address), command, str(tmp_path), {}, [nothing] * 3, 0.5)
    os.close(nothing)
    assert asked(address, "-c", "print(1)", folder=tmp_path)[0] == "1\n"
    assert not (tmp_path / "late").exists()
    process.communicate()


@pytest.mark.parametrize(("size", "streams"), [(2**64 - 1, 3), (10, 2), (2, 3)])
def test_a_malformed_command_is_dropped(address: Path, tmp_path: Path, size: int, streams: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(str(address))
        given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [nothing] * streams))]
        asker.sendmsg([size.to_bytes(8, "big")], given)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            asker.sendall(b"nonsense")
            asker.shutdown(socket.SHUT_WR)
            assert asker.recv(8) == b""
    os.close(nothing)
    assert asked(address, "-c", "print(1)", folder=tmp_path)[0] == "1\n"


def test_it_ends_with_a_killed_starter_and_leaves_no_folder(tmp_path: Path) -> None:
    address = tmp_path / "own" / "door"
    address.parent.mkdir()
    code = (
        "import os, pathlib, time\n"
        "from deploy.run.warm.workers import start_process\n"
        f"print(start_process(pathlib.Path({str(address)!r}), (), dict(os.environ)).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        number = int(starter.stdout.readline())
        wait_until(address.exists)
        starter.kill()
    wait_until(lambda: not psutil.pid_exists(number))
    assert not address.parent.exists()
