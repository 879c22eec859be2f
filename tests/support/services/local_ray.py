"""Ray clusters of one node."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray

_shared: list[None] = []


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Start a cluster with so many CPU cores on this machine and connect to it; both end with the context."""
    _start(cpus)
    try:
        yield
    finally:
        ray.shutdown()


def share_ray() -> None:
    """Connect to the cluster that tests of several modules share; it is started unless it runs.

    It has four CPU cores and one `ocr_node`.
    """
    if not _shared:
        _start(4, ocr_node=1.0)
        _shared.append(None)


def leave_shared_ray() -> None:
    """End the shared cluster, if it runs: the next test has one of its own."""
    if _shared:
        ray.shutdown()
        _shared.clear()


def _start(cpus: int, **resources: float) -> None:
    ray.init(
        address="local",
        num_cpus=cpus,
        resources=resources,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
