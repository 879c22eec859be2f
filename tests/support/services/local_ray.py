"""A Ray cluster of one node for the tests of a module."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(cpus: int, resources: Mapping[str, float] | None = None) -> Iterator[None]:
    """Start a cluster on this machine and connect to it; both end with the context.

    Args:
        cpus: CPU cores that the cluster counts.
        resources: its other resources.
    """
    ray.init(
        address="local",
        num_cpus=cpus,
        resources=dict(resources or {}),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
