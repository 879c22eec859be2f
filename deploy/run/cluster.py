"""The Ray cluster of a run: a given cluster keeps running afterwards, but a local one ends with the run."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.label_utils import validate_label_selector  # Ray has no public function for this check
from ray.exceptions import AuthenticationError

from deploy.run.inputs import environment_problems, gpu_problems, label_problems
from deploy.run.signals import outliving_the_terminal
from flowcredit.packages import FOLDER_VARIABLE, HOOK, hidden, shadows
from protocol.config.cluster import cluster_address
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, named_line, one_line
from protocol.sink import StatusSink

PROBE_TIMEOUT_S = 10.0
"""Seconds in which the given address must accept a connection; Ray itself would try for minutes."""

PLAIN = re.compile(r"[\w.-]+")
"""Matches a plain value of a label, but not an expression."""

GROWTH = 4
"""Additional CPUs of a local cluster, for actors that `scale` adds later."""

NO_TASK_EVENTS = {"task_events_report_interval_ms": 0}
"""Ray's own config of a local cluster. Ray's server would grow by the events of the newest 100,000 calls, which only a
dashboard shows; a local cluster has none."""
NO_EARLY_WORKERS = {"prestart_worker_first_driver": False}
"""The same where workers are forks: a worker that Ray starts before it is asked for one would be none."""


@contextmanager
def ray_cluster(config: RunConfig, sink: StatusSink, python: str | None = None) -> Iterator[None]:
    """Connect to `cluster.address` or RAY_ADDRESS; without either, start Ray on loopback and stop it at the end.

    If a given cluster cannot fit all actors, the condition `ClusterFits` reports it at startup; actors without a node
    wait for nodes to join.

    Args:
        python: what starts a worker of a local cluster (`deploy.run.warm.workers`); default: this Python.

    Raises:
        ConfigError: this process already uses Ray, no cluster answers at the given address or it does not take this
            process, Ray does not start on this machine, the actors reserve more GPUs than it has, or Ray does not
            accept the labels or a runtime environment.
    """
    address = cluster_address(config.cluster)
    logging.getLogger("ray").setLevel(logging.ERROR)
    for problem in (*gpu_problems(config), *label_problems(config), *environment_problems(config)):
        raise problem
    _require_labels(config)
    if ray.is_initialized():  # the end of this context would end that connection
        raise ConfigError("this process must not use Ray yet, got a connection to a cluster: call ray.shutdown() first")
    try:
        _connect(config, address, python)
        if address:
            _report_fit(config, sink)
        yield
    finally:
        ray.shutdown()


def _connect(config: RunConfig, address: str | None, python: str | None) -> None:
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    environment: dict[str, Any] = {}
    is_hiding = hidden()  # Ray puts the working folder first
    if shadows() or is_hiding:
        environment = {"worker_process_setup_hook": HOOK}
    if is_hiding:
        environment["env_vars"] = {FOLDER_VARIABLE: os.getcwd()}
    environment |= {"py_executable": python} if python else {}
    if environment:
        quiet["runtime_env"] = environment
    if not address:
        _start(config, quiet, is_forking=bool(python))
        return
    try:
        require_answer(address, timeout_s=PROBE_TIMEOUT_S)
        ray.init(address=address, **quiet)
    except (OSError, OverflowError, ValueError, RuntimeError, AuthenticationError) as error:
        raise ConfigError(
            f"cannot use a Ray cluster at {address}: {one_line(error)}; check cluster.address or RAY_ADDRESS, the"
            " cluster's versions of Ray and Python, and its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN)"
        ) from error


def require_answer(address: str, *, timeout_s: float) -> None:
    """Check that `host:port` or `SCHEME://host:port` accepts a connection; an address without a port is not tried.

    Raises:
        OSError: no connection in time.
        ValueError: the port is not a number.
        OverflowError: the number is not a port.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


def _start(config: RunConfig, quiet: dict[str, Any], *, is_forking: bool) -> None:
    try:
        with outliving_the_terminal():
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(config.reserved["CPU"]) + 1 + GROWTH),
                resources={name: need for name, need in config.reserved.items() if name not in ("CPU", "GPU")},
                include_dashboard=False,
                _system_config=NO_TASK_EVENTS | (NO_EARLY_WORKERS if is_forking else {}),
                _node_ip_address="127.0.0.1",
                **quiet,
            )
    except Exception as error:  # Ray raises a plain Exception if its processes do not start in time
        raise ConfigError(
            f"Ray does not start on this machine: {named_line(error)}; its logs are in RAY_TMPDIR (/tmp), which"
            " must be writable, have room and a short name; --local does without Ray"
        ) from error


def _require_labels(config: RunConfig) -> None:
    for name, role in config.cluster.roles.items():
        if rule := validate_label_selector(role.labels):
            raise ConfigError(f"cluster.{name}.labels must be Ray's label selectors, got {role.labels}: {rule}")


def _unlabelled(config: RunConfig) -> list[str]:
    """List the labels that no node has, with their roles; expressions such as `in(a, b)` are left to Ray."""
    nodes = [node.get("Labels", {}) for node in ray.nodes() if node["Alive"]]
    return [
        f"a node with the labels {role.labels} of cluster.{name}"
        for name, role in config.cluster.roles.items()
        if not any(role.labels.items() <= labels.items() for labels in nodes)
        and all(PLAIN.fullmatch(value) for value in role.labels.values())
    ]


def _report_fit(config: RunConfig, sink: StatusSink) -> None:
    found = ray.cluster_resources()
    lacking = [
        f"{amount:g} {kind} for all actors, has {found.get(kind, 0.0):g}"
        for kind, amount in config.reserved.items()
        if amount > found.get(kind, 0.0)
    ]
    lacking += _unlabelled(config)
    message = f"the cluster must have {', '.join(lacking)}: add nodes, or reserve less with cluster.*.cpus and .gpus"
    sink.condition(
        "ClusterFits",
        holds=not lacking,
        reason="TooSmall" if lacking else "Fits",
        message=message if lacking else "the cluster has room for all actors",
    )
