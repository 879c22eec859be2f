"""The Ray cluster of a run: a given one is used and left alone, otherwise a local one lives as long as the run."""

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from protocol.config import RunConfig
from protocol.errors import ConfigError

PROBE_TIMEOUT_S = 10.0
"""Seconds that the given address has to take a connection; Ray itself would try for minutes."""


@contextmanager
def ray_cluster(config: RunConfig) -> Iterator[None]:
    """Connect to `cluster.address` or RAY_ADDRESS; without either start Ray on loopback and stop it at the end.

    Raises:
        ConfigError: no cluster answers at the given address, or more GPUs are asked for than this machine has.
    """
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        if address:
            _probe(address)
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local",
                num_cpus=_needed_cpus(config),
                resources=_needed_resources(config),
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        if not address:
            raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"no Ray cluster answers at {address}: {reason}; check cluster.address or RAY_ADDRESS"
        ) from None
    try:
        if not address:
            _require_gpus(config)
        yield
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Raises OSError, OverflowError or ValueError when nothing takes a connection at `host:port` or `ray://host:port`."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()


def _require_gpus(config: RunConfig) -> None:
    cluster = config.cluster
    rewards = sum(
        reward.actors * (cluster.reward.gpus if reward.gpus is None else reward.gpus)
        for reward in config.rewards.values()
    )
    asked = cluster.rollout_actors * cluster.rollout.gpus + rewards + cluster.learner.gpus
    found = ray.cluster_resources().get("GPU", 0.0)
    if asked > found:
        raise ConfigError(
            f"cluster.*.gpus must not ask for more GPUs than there are, {found:g}, got {asked:g}:"
            " an actor without its GPU would wait for ever"
        )


def _needed_resources(config: RunConfig) -> dict[str, float]:
    """Custom resources that the reward actors ask for, all together."""
    needed: Counter[str] = Counter()
    for reward in config.rewards.values():
        for resource, amount in reward.resources.items():
            needed[resource] += reward.actors * amount  # pyright: ignore[reportArgumentType]
    return dict(needed)


def _needed_cpus(config: RunConfig) -> int:
    """CPUs that the actors reserve: on one machine they take turns, so the local cluster is as large as they ask."""
    cluster = config.cluster
    rewards = sum(
        reward.actors * (cluster.reward.cpus if reward.cpus is None else reward.cpus)
        for reward in config.rewards.values()
    )
    asked = cluster.rollout_actors * cluster.rollout.cpus + rewards + cluster.learner.cpus
    return max(os.cpu_count() or 1, int(asked) + 1)
