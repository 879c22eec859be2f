"""Why Ray does not start, or does not take this process: each cause that can be recognised has its own remedy."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray._private.utils import check_version_info
from ray.exceptions import AuthenticationError

from deploy.run import ray_errors
from deploy.run.ray_errors import not_connected, not_started
from protocol.errors import LONGEST_LINE
from tests.support.faults.disks import NoRightToMountError, fill, small_disk
from tests.support.paths import ROOT

WAITED = (
    "The current node timed out during startup. This could happen because some of the raylet failed to startup or the"
    " GCS has become overloaded."
)
GCS = (
    "Failed to start GCS.  Last 2 lines of error files:\n"
    + "[2026-01-01 00:00:00,000 E 1 1] (gcs_server) gcs_server.cc:99: the table of nodes is empty\n" * 6
    + "[2026-01-01 00:00:00,000 C 1 1] (gcs_server) grpc_server.cc:129: Failed to bind: Address already in use\n"
    ".Please check /tmp/ray/session_1/logs/gcs_server.out for details. Last connection error: None"
)


OTHER = "another program listens there; the head .* port 6379"


def system(number: int, path: str = "/tmp/ray") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            OSError("AF_UNIX path length cannot exceed 107 bytes: /x"),
            "set RAY_TMPDIR to a folder with a short path",
        ),
        (system(errno.ENOSPC), "set RAY_TMPDIR to a folder with room"),
        (system(errno.EDQUOT), "set RAY_TMPDIR to a folder with room"),
        (system(errno.EACCES), "make them writable, or set RAY_TMPDIR to another folder"),
        (system(errno.EROFS), "make them writable, or set RAY_TMPDIR to another folder"),
        (system(errno.ENOTDIR), "RAY_TMPDIR must be a folder"),
        (system(errno.EADDRINUSE), "widen net.ipv4.ip_local_port_range"),
        (system(errno.EMFILE), "`ulimit -n`"),
        (system(errno.EAGAIN), "`ulimit -u`"),
        (RuntimeError("can't start new thread"), "`ulimit -u`"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "Ray takes only UTF-8"),
        (ValueError("something new"), "must be writable, have room and short names"),
    ],
    ids=str,
)
def test_a_start_that_fails_has_the_remedy_for_its_cause(error: Exception, remedy: str) -> None:
    line = str(not_started(error))
    assert line.startswith(f"Ray does not start on this machine: {type(error).__name__}: ")
    assert remedy in line and line.endswith("; --local does without Ray")


def test_of_a_long_message_the_line_with_the_cause_is_kept() -> None:
    assert len(GCS[: GCS.index("Address")]) > LONGEST_LINE
    line = str(not_started(RuntimeError(GCS)))
    assert "Failed to bind: Address already in use; end programs that keep ports open" in line
    assert "\n" not in line and "table of nodes" not in line


def test_the_cause_may_be_an_exception_before_the_last() -> None:
    error = RuntimeError("the node is gone")
    error.__cause__ = system(errno.ENOSPC, "/tmp/ray/session")
    assert "No space left on device: '/tmp/ray/session'; free some space there" in str(not_started(error))


def test_a_start_that_waited_in_vain_names_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with small_disk(tmp_path / "disk") as disk:
            fill(disk)
            monkeypatch.setenv("RAY_TMPDIR", str(disk))
            line = str(not_started(Exception(WAITED)))
    except NoRightToMountError as error:
        pytest.skip(f"no right to mount: {error}")
    assert f"no space is left in {tmp_path / 'disk'}: free some space there" in line


def test_a_start_that_waited_on_a_machine_that_lacks_nothing_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    line = str(not_started(Exception(WAITED)))
    assert "overloaded.; the machine may have been too busy: try again" in line
    assert f"{tmp_path}/ray/session_latest/logs" in line


def test_a_cluster_of_another_version_names_both() -> None:
    with pytest.raises(RuntimeError) as raised:
        check_version_info({"ray_version": "2.1.0", "python_version": "3.9.1"}, "node 10.0.0.1:6379")
    line = str(not_connected(raised.value, "10.0.0.1:6379"))
    here = ".".join(map(str, sys.version_info[:3]))
    assert line.startswith(
        "this process must have the versions of the Ray cluster at 10.0.0.1:6379, Ray 2.1.0 with Python 3.9.1, got Ray "
    )
    assert line.endswith(f"with Python {here}: install the cluster's")


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_cluster_that_asks_for_its_token_names_the_variables(is_wrapped: bool) -> None:
    error: Exception = AuthenticationError("RPC error: InvalidAuthToken: Authentication token is missing or incorrect.")
    if is_wrapped:  # as Ray does it while it connects
        last = RuntimeError(f"Failed to connect to GCS. Last connection error: Traceback:\n{error}")
        error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
        error.__cause__ = last
    line = str(not_connected(error, "10.0.0.1:6379"))
    assert line.startswith("the Ray cluster at 10.0.0.1:6379 asks for its token: set RAY_AUTH_MODE=token")


def test_a_job_whose_environment_contradicts_ours_is_not_called_unreachable() -> None:
    said = "Failed to merge the Job's runtime env {} with a ray.init's runtime env {} because of a conflict."
    line = str(not_connected(ValueError(said), "auto"))
    assert line.startswith("the runtime_env of the Ray job sets what flowcredit sets too: Failed to merge")


@pytest.mark.parametrize(
    ("change", "address", "remedy"),
    [
        ("true", "127.0.0.1", "(ip link set lo up) and let no firewall close it"),
        (
            "ip link set lo up; mount --bind {hosts} /etc/hosts",
            "192.0.2.77",
            "correct the line of {name} in /etc/hosts",
        ),
    ],
    ids=["no loopback", "another address for its name"],
)
def test_a_machine_that_cannot_reach_itself_is_one_line_within_seconds(
    change: str, address: str, remedy: str, tmp_path: Path
) -> None:
    """In a new network namespace the loopback interface is down; Ray would wait for many minutes."""
    apart = ["unshare", "--net", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no right to make a network namespace")
    hosts, name = tmp_path / "hosts", socket.gethostname()
    hosts.write_text(f"127.0.0.1 localhost\n192.0.2.77 {name}\n")
    words = [sys.executable, "-m", "flowcredit", "train", "toy_geneval", "--run", str(tmp_path / "run")]
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [*apart, "sh", "-c", change.format(hosts=hosts) + '; exec "$@"', "sh", *words],
        env=variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 2
    (line,) = [each for each in done.stderr.splitlines() if "network_util.cc" not in each]  # Ray's own warning
    assert line.startswith(f"flowcredit: this machine must reach itself at {address} for a Ray of its own: ")
    assert line.endswith(f"{remedy.format(name=name)}; --local does without Ray")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("greeting", "problem"),
    [
        ([bytes([0, 0]), bytes([18, 4, 0, 0, 0, 0, 0])], None),
        ([b"HTTP/1.0 400 Bad request syntax"], OTHER),
        ([b"-ERR unknown command"], OTHER),
        ([], OTHER),
        (None, "what listens there says nothing for 0.2 s"),
    ],
    ids=["gRPC", "HTTP", "Redis", "closes", "is silent"],
)
def test_a_port_of_another_program_is_not_taken_for_the_head_of_a_cluster(
    greeting: list[bytes] | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait for minutes."""
    monkeypatch.setattr(ray_errors, "ANSWER_S", 10.0 if greeting is not None else 0.2)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            line, _ = door.accept()
            with line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.recv(100)
                if greeting is None:
                    is_over.wait(30)
                for part in greeting or []:
                    line.sendall(part)
                    time.sleep(0.05)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        address = f"127.0.0.1:{door.getsockname()[1]}"
        if problem:
            with pytest.raises(OSError, match=problem):
                ray_errors.require_head(address, timeout_s=10)
        else:
            ray_errors.require_head(address, timeout_s=10)
        is_over.set()
        server.join(30)


def test_an_address_without_a_port_is_left_to_ray() -> None:
    ray_errors.require_head("auto", timeout_s=10)
