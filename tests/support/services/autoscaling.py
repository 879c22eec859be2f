"""A Ray cluster on this machine whose autoscaler starts and ends nodes, as one on Kubernetes does.

`ray.cluster_utils.AutoscalingCluster` would do the same, but it stops every Ray cluster of the machine first.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.paths import ROOT
from tests.support.services.serving import free_port

HEAD_ID = "f" * 51 + "00000"
"""Node id by which Ray's provider of fake nodes knows the head."""


@contextmanager
def autoscaling_cluster(
    folder: Path, *, head: Mapping[str, int], nodes: Mapping[str, int], most: int, idle_s: float
) -> Iterator[str]:
    """Start a head whose autoscaler adds nodes for actors that wait.

    Args:
        folder: for the cluster's config.
        head: resources of the head.
        nodes: resources of every node that the autoscaler starts.
        most: nodes that it may start.
        idle_s: seconds after which an idle node is ended.

    Returns:
        The address, as a context that ends all processes.
    """
    address = f"127.0.0.1:{free_port()}"
    config = {
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "external",  # by the name "fake_multinode" Ray would read a file that its package lacks
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": dict(head), "node_config": {}, "max_workers": 0},
            "worker": {"resources": dict(nodes), "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": "ray.head.default",
        **{f"{part}setup_commands": [] for part in ("", "head_", "worker_")},
        **{f"{part}_start_ray_commands": [] for part in ("head", "worker")},
        "initialization_commands": [],
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
    }
    (folder / "cluster.json").write_text(json.dumps(config))
    words = {
        "autoscaling-config": folder / "cluster.json",
        "node-ip-address": "127.0.0.1",
        "port": address.rpartition(":")[2],
        "ray-client-server-port": free_port(),
        "include-dashboard": "false",
        "num-cpus": head["CPU"],
    }
    variables = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # The head must ask for a token if this process does, which `ray.init` of a local cluster makes it do.
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "PYTHONPATH": os.fspath(ROOT),
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:  # a socket's path must be short
        options = [f"--{name}={value}" for name, value in (words | {"temp-dir": temporary}).items()]
        with (folder / "ray.log").open("w") as log:
            started = subprocess.Popen(
                [*ray, *options], env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield address
        finally:
            tree = [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
            for process in tree:
                process.kill()
            psutil.wait_procs(tree, timeout=30)
