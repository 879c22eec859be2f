"""The Ray cluster that a run starts for itself: closed to everyone without its token."""

from collections.abc import Callable

import grpc
import pytest
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from deploy.run.cluster import ray_cluster
from protocol.config.run import RunConfig
from tests.support.runs.sinks import Silent

pytestmark = pytest.mark.ray


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
