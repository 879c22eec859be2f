"""The Ray cluster that a run starts for itself: closed to everyone without its token."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from deploy.run.cluster import ray_cluster
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.support.runs.sinks import Silent

pytestmark = pytest.mark.ray


def test_a_machine_on_which_ray_cannot_start_is_one_line(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names of Ray's sockets are limited to 107 bytes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 90)))
    with pytest.raises(ConfigError, match="Ray does not start on this machine: OSError: .* cannot exceed 107 bytes"):
        ray_cluster(tiny_config(), Silent()).__enter__()
    assert not ray.is_initialized()


def test_a_process_that_already_uses_ray_keeps_its_connection(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a notebook that has called ray.init: the end of the run would have ended its cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_cluster(tiny_config(), Silent()):
        with pytest.raises(ConfigError, match="must not use Ray yet, got a connection"):
            ray_cluster(tiny_config(), Silent()).__enter__()
        assert ray.is_initialized()


def test_a_local_cluster_refuses_a_caller_without_its_token(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray listens on every interface, whatever its node's address is."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with ray_cluster(tiny_config(), Silent()):
        address = ray.get_runtime_context().gcs_address
        with grpc.insecure_channel(address) as channel:
            nodes = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                nodes.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=60)
    assert "token" in str(refused.value).lower()
