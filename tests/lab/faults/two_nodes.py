"""A local cluster of two nodes, and hands that harm a run on it.

Only processes below this cluster's own raylets are touched: other people's Ray on the machine is left alone.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from tests.support.paths import ROOT
from tests.support.runs.scene import Driver
from tests.support.warm.ray_workers import workers_of

KINDS = {"rollout": "ray::RolloutActor", "reward": "ray::RewardActor", "learner": "ray::LearnerWorker"}
"""How Ray names the processes of each kind of actor."""


class TwoNodes:
    """A head node and a worker node on this machine, with failures noticed within seconds."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 5000,
            "health_check_failure_threshold": 5,
            "max_direct_call_object_size": 1024,
            "task_rpc_inlined_bytes_limit": 1024,
        }
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False, "_system_config": quick}
        )
        self.worker = self.cluster.add_node(num_cpus=4)
        self._has_worker = True
        self._stopped: list[psutil.Process] = []
        self.address = self.cluster.address

    def actors(self, kind: str, *, on_worker: bool = False) -> list[psutil.Process]:
        """Processes of actors of one kind."""
        nodes = [] if on_worker else [self.cluster.head_node]
        nodes += [self.worker] if self._has_worker else []
        return [
            process for node in nodes for process in _below(_raylet(node)) if _name(process).startswith(KINDS[kind])
        ]

    def harm(self, kind: str, number: signal.Signals) -> int:
        """Send a signal to one actor of a kind; its process id."""
        deadline = time.monotonic() + 60
        while not (found := [p for p in self.actors(kind) if p.status() != psutil.STATUS_STOPPED]):
            assert time.monotonic() < deadline, f"no {kind} actor to harm"
            time.sleep(0.2)
        found[0].send_signal(number)
        return found[0].pid

    def harm_worker_raylet(self, number: signal.Signals) -> int:
        """Send a signal to the worker node's raylet, after which the node counts as lost; how many actors lived
        there. A node that was lost before is replaced first."""
        if not self._has_worker:
            self.worker = self.cluster.add_node(num_cpus=4)
        lost = sum(len(self.actors(kind, on_worker=True)) for kind in KINDS)
        raylet = psutil.Process(_raylet(self.worker))
        raylet.send_signal(number)
        self._has_worker = False
        self._stopped += [raylet] if number == signal.SIGSTOP else []
        return lost

    def stop(self) -> None:
        """End both nodes."""
        for raylet in self._stopped:
            with suppress(psutil.NoSuchProcess):
                for process in [*_below(raylet.pid), raylet]:
                    process.kill()
        self.cluster.shutdown()


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """A cluster for one test."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        nodes = TwoNodes()
    except Exception:  # noqa: BLE001  whatever a server says while it starts
        nodes = TwoNodes()
    try:
        yield nodes
    finally:
        nodes.stop()
        os.environ.pop("PYTHONPATH") if before is None else os.environ.__setitem__("PYTHONPATH", before)


def harm_board(driver: Driver, number: signal.Signals) -> None:
    """Send a signal to the run's own board, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process(driver.process.pid).children(recursive=True):
            program = _name(process).partition(" ")[0]
            if program.endswith(("valkey-server", "redis-server")):
                process.send_signal(number)
                return
        time.sleep(0.2)
    raise AssertionError(f"no board to harm:\n{driver.text}")


def _below(raylet: int) -> list[psutil.Process]:
    found = [psutil.Process(pid) for pid in workers_of(raylet) if psutil.pid_exists(pid)]
    with suppress(psutil.NoSuchProcess):
        found += psutil.Process(raylet).children(recursive=True)
    return found


def _raylet(node: Any) -> int:
    from ray._private import ray_constants

    return node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
