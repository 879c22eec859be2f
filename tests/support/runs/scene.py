"""A short run as a process of its own, on a local cluster of two nodes, and hands that harm it.

Only processes below this cluster's own raylets are touched: other people's Ray on the machine is left alone.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from deploy.folder.read import lines_of
from deploy.tools.verify import verify
from learner.checkpoint import newest_checkpoint
from protocol.ground.files import ADAPTER_FILE
from tests.support.paths import ROOT
from tests.support.runs.metrics import untimed
from tests.support.warm.command import start_python
from tests.support.warm.ray_workers import workers_of

ITERATIONS = 20
KINDS = {"rollout": "ray::RolloutActor", "reward": "ray::RewardActor", "learner": "ray::LearnerWorker"}
"""How Ray names the processes of each kind of actor."""
Story = tuple[str, list[dict[str, Any]]]
"""sha256 of the last adapter, and all metrics but wall times and counts of what had to be tried again."""
LINE_S = 180.0
"""Seconds until the next line of a run at the latest."""


def preset(folder: Path, model: Path, /, **sections: Any) -> Path:
    """A run of 20 short iterations; sections are merged into its own."""
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle\na blue square\ntwo triangles\na green star\n")
    tree: dict[str, Any] = {
        "seed": 3,
        "iterations": ITERATIONS,
        "model": {"path": str(model), "max_sequence_length": 2, "lora": {"rank": 4, "alpha": 8}},
        "data": {"train": str(prompts), "heldout": str(prompts)},
        "sampling": {"steps": 4},
        "completion": {"substeps": 2},
        "group": {"size": 4, "shard": 2, "per_iteration": 2, "max_lag": 1},
        "learner": {"updates_per_iteration": 1, "learning_rate": 1e-3},
        "rewards": {"redness": {"scorer": "tests.support.rewards.judges:Redness"}},
        "evaluation": {"component": "reward", "steps": 2, "images_per_prompt": 1, "batch": 2},
        "checkpoint": {"every": 4},
        "cluster": {"heartbeat_s": 5, "max_restarts": 20, "restart_window_s": 60},
    }
    for name, value in sections.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Driver:
    """One `flowcredit train` and what it says."""

    def __init__(self, preset: Path, run: Path, *words: str, program: Sequence[str] = ("-m", "flowcredit")) -> None:
        command = ("-u", *program, "train", str(preset), "--run", str(run), *words)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = start_python(*command, environment=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        self.run = run
        self.said: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, is_it: Callable[[str], bool], *, begin: int = 0) -> str:
        """The first line from `begin` on, said or to come, for which this holds; AssertionError when none comes in
        time."""
        seen = begin
        with self._news:
            while True:
                for line in self.said[seen:]:
                    if is_it(line):
                        return line
                seen = len(self.said)
                if not self._reader.is_alive() and seen == len(self.said):
                    raise AssertionError(f"the run ended first:\n{self.text}")
                if not self._news.wait(LINE_S) and seen == len(self.said):
                    raise AssertionError(f"the run says nothing:\n{self.text}")

    def wait_for_iteration(self, number: int) -> None:
        """Returns when this iteration, or a later one, is done."""

        def is_it(line: str) -> bool:
            word = line.removeprefix("iteration ").partition("/")[0]
            return line.startswith("iteration ") and word.isdigit() and int(word) >= number

        self.wait_for(is_it)

    def finish(self, timeout_s: float = 300.0) -> str:
        """Everything it said; AssertionError unless it ended well."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        assert code == 0, self.text
        return self.text

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(60)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The run stands still inside, however fast its iterations are."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def harm_board(self, number: signal.Signals) -> None:
        """Send a signal to the run's own board, once it is there."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                program = _name(process).partition(" ")[0]
                if program.endswith(("valkey-server", "redis-server")):
                    process.send_signal(number)
                    return
            time.sleep(0.2)
        raise AssertionError(f"no board to harm:\n{self.text}")

    @property
    def text(self) -> str:
        """All lines so far."""
        return "\n".join(self.said)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.said.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


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


def story(run: Path) -> Story:
    """What a run left behind, to be compared with another's."""
    import hashlib

    found = newest_checkpoint(run / "checkpoints")
    assert found is not None
    sha = hashlib.sha256((found[1] / ADAPTER_FILE).read_bytes()).hexdigest()
    # The interval of a change needs the first evaluation's scores, which a copy of checkpoints does not hold.
    told = ({name: line[name] for name in line if not name.startswith("heldout_change/")} for line in lines_of(run))
    return sha, [untimed(line) for line in told]


def events(run: Path) -> list[dict[str, Any]]:
    """What the run told about itself."""
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def require_undisturbed(run: Path, expected: Story) -> None:
    """The same weights, the same metrics, every group once, and no failed score used."""
    sha, lines = story(run)
    assert sha == expected[0]
    assert lines == expected[1]
    assert [each for each in verify(run) if not each.is_whole] == []
    assert all(line.get("reward/missing", 0) == 0 for line in lines)


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
