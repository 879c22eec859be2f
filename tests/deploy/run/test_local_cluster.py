"""The Ray cluster that a run starts for itself: closed to everyone without its token, with forks of a warm process."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import grpc
import psutil
import pytest
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from deploy.run.cluster import ray_cluster
from deploy.run.warm.workers import warm_python
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.support.runs.sinks import Silent
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray
Config = Callable[..., RunConfig]


def test_a_machine_on_which_ray_cannot_start_is_one_line(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names of Ray's sockets are limited to 107 bytes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 90)))
    with pytest.raises(ConfigError, match="Ray does not start on this machine: OSError: .* cannot exceed 107 bytes"):
        ray_cluster(tiny_config(), Silent()).__enter__()
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def warm(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """A cluster as a user starts it, in a folder with modules; the start of a worker of its warm process."""
    folder = tmp_path_factory.mktemp("working")
    for name in ("sched", "of_my_own"):
        (folder / f"{name}.py").write_text("")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as held:
        for name in (
            "RAY_ADDRESS",
            "RAY_AUTH_MODE",
            "RAY_RUNTIME_ENV_HOOK",
            "RAY_prestart_worker_first_driver",
            "OMP_NUM_THREADS",
            "UV_RUN_RECURSION_DEPTH",
        ):
            patch.delenv(name, raising=False)
        patch.chdir(folder)
        config = tiny_config()
        python = held.enter_context(warm_python(config))
        held.enter_context(ray_cluster(config, Silent(), python))
        yield python


def test_a_process_that_already_uses_ray_keeps_its_connection(warm: str | None, tiny_config: Config) -> None:
    """Such as a notebook that has called ray.init: the end of the run would have ended its cluster."""
    with pytest.raises(ConfigError, match="must not use Ray yet, got a connection"):
        ray_cluster(tiny_config(), Silent()).__enter__()
    assert ray.is_initialized()


def test_a_local_cluster_refuses_a_caller_without_its_token(warm: str | None) -> None:
    """Ray listens on every interface, whatever its node's address is."""
    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        nodes = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            nodes.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=60)
    assert "token" in str(refused.value).lower()


def test_workers_find_a_library_before_a_module_of_the_working_folder_with_its_name(warm: str | None) -> None:
    """Ray puts the working folder first; a user's own torch.py there hid torch from every worker."""
    found = ray.remote(lambda name: import_module(name).__file__)
    library, own = ray.get([found.remote("sched"), found.remote("of_my_own")], timeout=120)
    assert (library, Path(own).name) == (import_module("sched").__file__, "of_my_own.py")


@pytest.mark.skipif(sys.platform != "linux", reason="forks after imports are for Linux")
def test_workers_of_a_local_cluster_are_forks_until_the_process_is_gone(warm: str | None) -> None:
    @ray.remote(max_calls=1)
    def parent() -> int:
        return os.getppid()

    folder = Path(shlex.split(warm or "")[-1]).parent
    assert folder.stat().st_mode & 0o077 == 0

    def starter() -> psutil.Process:
        return psutil.Process(ray.get(parent.remote(), timeout=100))

    # A worker waits only a while for the process's imports, then starts without it.
    wait_until(lambda: str(folder) in " ".join(starter().cmdline()))
    process = starter()
    process.kill()
    process.wait(30)
    assert starter() != process
