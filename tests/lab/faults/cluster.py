"""A Ray cluster on the machines of a lab, with token authentication and a board with a password, and jobs sent to it.

Machine 1 is the head, the last one is the user's laptop: it alone has the project, as its wheel installs it, and sends
jobs from a folder of its own that holds a preset, prompts and a scorer. The others are nodes: the first one behind a
link of 50 Mbit/s and with a clock that is a minute behind, the second one with a clock that is a minute ahead. So every
scene is one with a slow link and wrong clocks.
"""

import json
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.folder.metric_file import last_line
from deploy.folder.names import INPUTS, METRICS
from deploy.tools.verify import verify
from tests.lab.faults.lab import BUSY, HOME, STORE, Lab, Machine, until
from tests.support.paths import ROOT
from tests.support.runs.scene import Story, story
from tests.support.wheel import unpack_wheel

PASSWORD, TOKEN = "word-of-the-board", "token-of-the-status-api"
SECRETS = {"HF_TOKEN": "token-of-the-hub", "WANDB_API_KEY": "key-of-the-tracker"}
"""Set where the head's Ray starts, beside the board's address."""
RAY, JOBS, REDIS, API = 6379, 8265, 6390, 8400
VARIABLES = BUSY | {
    "RAY_AUTH_MODE": "token",
    "RAY_LD_PRELOAD_ON_WORKERS": "1",  # otherwise they would have the right clock
    "RAY_prestart_worker_first_driver": "0",  # workers without a job's environment, which no job takes
}
"""Of all machines."""
LINK = "50mbit"
"""The first node's."""
CLOCKS_S = (-60, 60)
"""How many seconds the clocks of the nodes are ahead."""
ODD = f"{HOME}/odd"
"""Folder on the second node from which its Ray workers import, before all others; empty unless a test fills it."""
FILLER = """
import time, numpy, ray
ray.init(address="auto", log_to_driver=False)
held = [ray.put(numpy.ones(24_000_000, numpy.uint8)) for _ in range(8)]
print("full", flush=True)
time.sleep(3600)
"""
"""Holds 192 MB of objects on its node, whose store has room for 100 MB."""
SERVICE = 'while :; do "$@"; kill -9 -1; sleep 1; done'
"""What a service manager does: it starts Ray again when it has ended, or did not come up within Ray's 30 s."""
SCORER = f"""

class Slow(Redness):
    \"\"\"Takes its time, and waits with an image beyond the number of a file `hold-NUMBER` on the shared disk.\"\"\"

    scored = 0

    def score(self, images, prompts, metadata):
        import pathlib, time

        time.sleep(0.15)
        self.scored += len(images)
        while any(self.scored > int(file.name[5:]) for file in pathlib.Path("{STORE}").glob("hold-*")):
            time.sleep(0.05)
        return super().score(images, prompts, metadata)
"""
"""Of the user's: faults come in the middle of a run, however fast the machine is."""
EVALUATED, SCORED = 4, 26
"""Images of an evaluation and of an iteration of the run below."""
RUN: dict[str, Any] = {
    "seed": 3,
    "iterations": 8,
    "model": {"path": "pkg://toyworld/model", "max_sequence_length": 1, "lora": {"rank": 4, "alpha": 8}},
    "data": {"train": "prompts.txt", "heldout": "prompts.txt"},
    "sampling": {"steps": 4},
    "completion": {"substeps": 1},
    "group": {"size": 4, "shard": 2, "per_iteration": 2},
    "learner": {"updates_per_iteration": 1, "learning_rate": 1e-3},
    "rewards": {"redness": {"scorer": "./mine.py:Slow"}},
    "evaluation": {"component": "reward", "steps": 2, "images_per_prompt": 1, "batch": 2},
    "checkpoint": {"every": 2},
    "cluster": {"heartbeat_s": 10, "max_restarts": 30, "restart_window_s": 60},
}
SMALL = (
    "toy_geneval",
    "group.size=2",
    "group.per_iteration=1",
    "learner.updates_per_iteration=1",
    "sampling.steps=4",
    "sampling.window.rule=all",
    "evaluation.steps=1",
    "evaluation.images_per_prompt=1",
)
"""A preset of the project with little to do in an iteration."""


def furnish_project(folder: Path) -> None:
    """Make `flowcredit/`, an installed wheel, and `project/` with a user's preset, prompts and scorer."""
    code, project = folder / "flowcredit", folder / "project"
    unpack_wheel(code)
    project.mkdir()
    (project / "mine.py").write_text((ROOT / "tests/support/rewards/judges.py").read_text() + SCORER)
    (project / "prompts.txt").write_text("a red circle\na blue square\ntwo triangles\na green star\n")
    (project / "mine.yaml").write_text(yaml.safe_dump(RUN))


def require_same(run: Path, expected: Story) -> None:
    """The same adapter and metrics as an undisturbed run, and a whole folder; its prompt files are not here."""
    assert story(run) == expected
    assert [each for each in verify(run) if not each.is_whole and each.subject != INPUTS] == []


def require_unwritten(machine: Machine, *secrets: str) -> None:
    """No log of Ray's on a machine, and no run folder there, holds one of these."""
    folders = [*machine.files.glob("tmp/ray/session_2*/logs"), machine.home / "flowcredit" / "runs"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files, machine.name
    held = {path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)}
    assert not held, f"{machine.name}: {held}"


class Cluster:
    """Made by `Cluster(lab)`; `start` starts Ray and Redis on it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.head, *self.nodes, self.laptop = lab.machines
        self._token = secrets.token_hex(32)
        self._processes: list[subprocess.Popen[str]] = []
        self._jobs: list[Job] = []
        for machine in lab.machines:
            machine.variables |= VARIABLES
            self.furnish(machine)
        furnish_project(self.laptop.home)
        self.laptop.variables |= {"PYTHONPATH": f"{HOME}/flowcredit"}

    @property
    def jobs(self) -> str:
        """Address of the job server."""
        return f"http://{self.head.address}:{JOBS}"

    @property
    def board(self) -> str:
        """Address of the board."""
        return f"redis://:{PASSWORD}@{self.head.address}:{REDIS}/0"

    def furnish(self, machine: Machine) -> None:
        """Put what every machine of the cluster has on its disk: Ray's token."""
        token = machine.home / ".ray" / "auth_token"
        token.parent.mkdir(exist_ok=True)
        token.write_text(self._token)
        token.chmod(0o600)

    def start(self) -> None:
        """Start Ray on the head and the nodes, and the board."""
        self.nodes[0].slow(LINK)
        for node, offset_s in zip(self.nodes, CLOCKS_S, strict=True):
            node.set_clock(offset_s)
        self.start_head()
        self.start_board()
        for count, node in enumerate(self.nodes, start=2):
            self.start_node(node)
            self.wait_for_nodes(count)

    def install(self, machine: Machine, folder: str) -> None:
        """Put the project's packages and the user's folder on a machine, below this folder of its home."""
        furnish_project(machine.home / folder)

    def start_head(self) -> None:
        """Start Ray's head and return when it takes jobs."""
        words = ["--head", "--port", str(RAY), "--dashboard-host", "0.0.0.0", "--dashboard-port", str(JOBS)]
        self._ray(self.head, *words, FLOWCREDIT_BOARD=self.board, **SECRETS)
        words = ["curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}", f"{self.jobs}/api/version"]
        until(lambda: self.head.run(words, code=None).endswith("401"), "the head asks for a token", seconds=600)

    def start_node(self, node: Machine) -> None:
        """Start Ray on a node; it joins as soon as it can."""
        words = ["--address", f"{self.head.address}:{RAY}"]
        if node is self.nodes[1]:
            words += ["--resources", '{"odd": 4}']
            self._ray(node, *words, PYTHONPATH=ODD)
        else:
            self._ray(node, *words)

    def _ray(self, machine: Machine, *words: str, **variables: str) -> None:
        own = ["--node-ip-address", machine.address, "--num-cpus", "2", "--num-gpus", "0", "--block"]
        own += ["--object-store-memory", "100000000", "--include-log-monitor", "False", "--no-monitor"]
        log = machine.files / "ray.log"
        command = ["bash", "-c", SERVICE, "service", "ray", "start", *words, *own]
        self._processes.append(machine.start(command, log=log, variables=variables))

    def restart_head(self, *, is_new: bool = False) -> None:
        """Take the head's power away and start it again, with its disk or with an empty one."""
        self.head.power_off()
        if is_new:
            self.head.new_disk()
            self.furnish(self.head)
        self.start_head()
        self.start_board()
        self.wait_for_nodes(1 + len(self.nodes))

    def start_board(self) -> None:
        """Start the board's Redis on the head."""
        words = ["redis-server", "--port", str(REDIS), "--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", ""]
        self._processes.append(self.head.start(words, log=self.head.files / "redis.log"))

    def wait_for_nodes(self, count: int) -> None:
        """Return when Ray counts this many living nodes."""
        until(lambda: self._nodes("ALIVE") == count, f"{count} nodes are alive", seconds=600)

    def dead_nodes(self) -> int:
        """How many nodes Ray has called dead so far."""
        return self._nodes("DEAD")

    def _nodes(self, state: str) -> int:
        words = ["curl", "-s", "-m", "5", "-H", f"Authorization: Bearer {self._token}", f"{self.jobs}/api/v0/nodes"]
        return self.head.run(words, code=None).count(f'"state": "{state}"')

    def rollout_node(self, run: str) -> Machine:
        """The machine of a rollout actor that is not on the head."""
        until(lambda: set(self.homes(run)) - {self.head.name}, f"a rollout actor of {run} is not on the head")
        name = max(self.homes(run))
        return next(node for node in self.nodes if node.name == name)

    @contextmanager
    def odd_node(self) -> Iterator[Path]:
        """The folder, empty, from which Ray's workers on the second node import before all others."""
        folder = self.nodes[1].home / Path(ODD).name
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @contextmanager
    def full_store(self, node: Machine) -> Iterator[None]:
        """Fill the object store of a node; later objects are spilled to its disk."""
        log = node.files / "filler.log"
        filler = node.start(["python", "-c", FILLER], log=log, beside="raylet")
        try:
            until(lambda: "full" in log.read_text() or filler.poll() is not None, f"the store of {node.name} is full")
            assert filler.poll() is None, log.read_text()
            assert list(node.files.glob("tmp/ray/session_2*/ray_spilled_objects*/*")), "nothing was spilled"
            yield
            assert filler.poll() is None, "the store was emptied before the end"
        finally:
            for process in node.processes("numpy.ones"):
                process.kill()
            filler.wait(30)

    def flowcredit(self, *words: str, code: int | None = 0, timeout_s: float = 300.0, board: str = "") -> str:
        """Run `flowcredit` on the laptop, in the user's folder, with a board; what it said."""
        command = ["bash", "-c", 'cd project && exec python -m flowcredit "$@"', "flowcredit", *words]
        variables = {"FLOWCREDIT_BOARD": board} if board else {}
        return self.laptop.run(command, code=code, timeout_s=timeout_s, variables=variables)

    def require_kept(self, *secrets: str) -> None:
        """No log of Ray's on any machine, no answer of `ray job list` and no run folder holds one of these."""
        listed = self.laptop.run(["ray", "job", "list", "--address", self.jobs])
        assert not [secret for secret in secrets if secret in listed]
        for machine in (self.head, *self.nodes):
            require_unwritten(machine, *secrets)

    def submit(self, run: str, *words: str, held_after: int = 0) -> "Job":
        """Send a job with `flowcredit submit --wait`; after iteration `held_after` it waits for `release`.

        A job that a failed scene left is stopped first: it would hold the room of this one.
        """
        self.release()
        for left in self._jobs:
            left.stop()
        if held_after:
            self.hold(held_after)
        command = ["bash", "-c", 'cd project && exec python -u -m flowcredit "$@"', "flowcredit"]
        command += [
            "submit",
            "mine.yaml",
            "--address",
            self.jobs,
            "--run",
            run,
            "--wait",
            *words,
        ]
        self._jobs = [Job(self, run, self.laptop.start(command))]
        return self._jobs[0]

    def hold(self, iteration: int) -> None:
        """Let a run wait for `release` after this iteration."""
        (self.lab.store / f"hold-{EVALUATED + iteration * SCORED}").touch()

    def release(self) -> None:
        """Let a held run go on."""
        for file in self.lab.store.glob("hold-*"):
            file.unlink()

    def failures(self, run: str) -> int:
        """Actors of a run that failed, by its events."""
        return (self.run_folder(run) / "events.jsonl").read_text().count("actor_failed")

    def run_folder(self, run: str) -> Path:
        """A run's folder, on the head or on the shared disk, as the test sees it."""
        if run.startswith(STORE):
            return self.lab.store / Path(run).relative_to(STORE)
        return self.head.home / "flowcredit" / "runs" / run

    def homes(self, run: str) -> list[str]:
        """Host names of the nodes on which the run's rollout actors are ready."""
        told = self.run_folder(run) / "status.json"
        actors = json.loads(told.read_text())["status"]["actors"] if told.exists() else []
        return [each["node"] for each in actors if each["kind"] == "rollout" and each["node"]]

    def iteration(self, run: str) -> int:
        """Newest iteration of a run, by its metrics."""
        newest = last_line(self.run_folder(run) / METRICS)
        return newest["iteration"] if newest else 0

    def wait_for_iteration(self, run: str, number: int) -> None:
        """Return when an iteration of a run is done."""
        until(lambda: self.iteration(run) >= number, f"iteration {number} of {run}", seconds=300)

    def undisturbed(self, *words: str) -> Story:
        """The story of the same run in one process on the laptop."""
        self.flowcredit("train", "mine.yaml", "--local", "--run", "undisturbed", *words)
        return story(self.laptop.home / "project" / "undisturbed")

    def require_undisturbed(self, run: str, expected: Story) -> None:
        """The same bits, every group once, and no failed score."""
        require_same(self.run_folder(run), expected)

    def serve(self) -> None:
        """Serve the status API on the laptop, over the board."""
        words = ["python", "-m", "flowcredit", "serve", "--host", self.laptop.address, "--port", str(API)]
        variables = {"FLOWCREDIT_TOKEN": TOKEN, "FLOWCREDIT_BOARD": self.board}
        self._processes.append(self.laptop.start(words, log=self.laptop.files / "serve.log", variables=variables))
        until(lambda: self.api("GET", "/healthz", code=None), "the status API answers")

    def api(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str = TOKEN,
        code: int | None = 200,
    ) -> Any:
        """Ask the status API from a node.

        Args:
            method: of HTTP.
            path: begins with a slash.
            body: sent as JSON.
            token: sent as bearer token.
            code: status that the answer must have; None takes any answer, and none.

        Returns:
            The answer's JSON.
        """
        url = f"http://{self.laptop.address}:{API}{path}"
        words = [
            "curl",
            "-s",
            "-m",
            "20",
            "-w",
            "\\n%{http_code}",
            "-X",
            method,
            "-H",
            f"Authorization: Bearer {token}",
            url,
        ]
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        said = self.nodes[-1].run(words, code=None).strip()
        text, _, status = said.rpartition("\n")
        assert code is None or status == str(code), said
        return json.loads(text) if text else None

    def pause(self, run: str) -> None:
        """Pause a held run through the status API; return when it is paused."""
        self._command(run, "pause")
        until(lambda: self._status(run)["is_pause_requested"], f"{run} has taken the command")
        self.release()
        until(lambda: self._status(run)["phase"] == "paused", f"{run} is paused")

    def resume(self, run: str, *, held_after: int) -> None:
        """Let a paused run go on; after iteration `held_after`, unless 0, it waits for `release`."""
        if held_after:
            self.hold(held_after)
        self._command(run, "resume")
        until(lambda: self._status(run)["phase"] != "paused", f"{run} goes on")

    def _command(self, run: str, command: str) -> None:
        self.api("POST", f"/runs/{run}/commands", {"command": command}, code=202)

    def _status(self, run: str) -> Any:
        return self.api("GET", f"/runs/{run}")

    def ready(self, run: str) -> int:
        """Rollout actors that are ready, by the status API."""
        (pool,) = [pool for pool in self._status(run)["pools"] if pool["name"] == "rollout"]
        return pool["ready"]

    def stop(self) -> None:
        """End every process of the cluster."""
        for machine in self.lab.machines:
            machine.power_off()
        for process in self._processes:
            process.wait(30)


class Job:
    """A `flowcredit submit --wait` on the laptop and what it shows."""

    def __init__(self, cluster: Cluster, run: str, process: "subprocess.Popen[str]") -> None:
        self.run = run
        self.said: list[str] = []
        self._cluster = cluster
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything that it has shown."""
        return "".join(self.said)

    @property
    def id(self) -> str:
        """Submission id."""
        until(lambda: self._ids() or not self._reader.is_alive(), "the job has an id")
        assert self._ids(), self.text
        return self._ids()[0]

    def _ids(self) -> list[str]:
        return [line.split()[1] for line in self.said if line.startswith("job ")]

    def wait_for_iteration(self, number: int) -> None:
        """Return when an iteration is done; AssertionError when the job ends first."""

        def is_done() -> bool:
            done = self._cluster.iteration(self.run) >= number
            assert done or self._reader.is_alive(), self.text
            return done

        until(is_done, f"iteration {number} of {self.run}:\n{self.text}", seconds=300)

    def finish(self, *, code: int = 0, timeout_s: float = 400.0) -> str:
        """Everything it showed; AssertionError unless it ended with this code."""
        try:
            ended = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"{self.run} did not end within {timeout_s:g} s:\n{self.text}") from None
        self._reader.join(10)
        assert ended == code, f"it ended with {ended}:\n{self.text}"
        return self.text

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Stop the job if it still goes on."""
        if not self.has_ended:
            for job in self._ids():
                command = ["ray", "job", "stop", "--address", self._cluster.jobs, job]
                self._cluster.laptop.run(command, code=None, timeout_s=200)
            self.leave()

    def leave(self) -> None:
        """Stop following."""
        self._process.kill()
        self._process.wait(30)

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.said.append(line)
