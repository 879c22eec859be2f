"""Ray on this machine alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def local_ray(cpus: int, **more: Any) -> Iterator[None]:
    """Start Ray with so many CPUs, which the machine need not have, and further options of `ray.init`."""
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        configure_logging=False,
        **more,
    )
    try:
        yield
    finally:
        ray.shutdown()
