"""Stand-ins for Slurm's `srun` and `scontrol` on the machines of a lab, which share one disk as a Slurm cluster does.

`srun` leaves a request on the shared disk; `Allocation` starts it on the machine that it names.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

from tests.lab.faults.lab import BUSY, STORE, Machine

SRUN = f"""#!/usr/bin/env python3
import json, os, pathlib, signal, sys, time, uuid
words = sys.argv[1:]
options = []
while words[0].startswith("--"):
    options.append(words.pop(0))
(node,) = [option.partition("=")[2] for option in options if option.startswith("--nodelist=")]
step = pathlib.Path("{STORE}/srun") / uuid.uuid4().hex
step.mkdir(parents=True)
signal.signal(signal.SIGTERM, lambda *_: (step / "stop").touch())
environment = {{name: value for name, value in os.environ.items() if name.startswith(("RAY_", "FLOWCREDIT_"))}}
(step / "partial").write_text(json.dumps({{"node": node, "words": words, "environment": environment}}))
(step / "partial").rename(step / "request")
seen = 0
while True:
    is_over = (step / "code").exists()
    if (step / "out").exists():
        text = (step / "out").read_text()
        print(text[seen:], end="", flush=True)
        seen = len(text)
    if is_over:
        sys.exit(int((step / "code").read_text()))
    time.sleep(0.2)
"""
SCONTROL = f"""#!/usr/bin/env bash
case $1 in
show) printf '%s\\n' $LAB_NODES ;;
requeue) echo "$2" >>{STORE}/requeued ;;
esac
"""


class Allocation:
    """The nodes of one Slurm job; a context. The batch script runs on the first."""

    def __init__(self, machines: list[Machine]) -> None:
        self._machines = {machine.name: machine for machine in machines}
        self._store = machines[0].store
        self._steps: dict[Path, subprocess.Popen[str]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        programs = self._store / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for machine in machines:
            path = f"{STORE}/bin:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
            machine.variables |= BUSY | {"PATH": path, "PYTHONPATH": f"{STORE}/flowcredit"}

    def __enter__(self) -> "Allocation":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def start(self, script: str, *words: str, restarts: int = 0) -> "subprocess.Popen[str]":
        """Start a batch script; paths are those of the shared disk."""
        first = next(iter(self._machines.values()))
        variables = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "m[1-2]",
            "SLURM_RESTART_COUNT": str(restarts),
            "LAB_NODES": " ".join(self._machines),
        }
        command = ["bash", "-c", f'cd {STORE}/project && bash "$@"', "slurm", script, *words]
        return first.start(command, variables=variables, log=self._store / "batch.log")

    def _serve(self) -> None:
        while not self._ended.wait(0.2):
            for request in self._store.glob("srun/*/request"):
                if request.parent not in self._steps:
                    asked = json.loads(request.read_text())
                    self._steps[request.parent] = self._machines[asked["node"]].start(
                        asked["words"], variables=asked["environment"], log=request.parent / "out"
                    )
            for step, process in self._steps.items():
                if (step / "stop").exists() and process.poll() is None:
                    process.kill()
                if process.poll() is not None and not (step / "code").exists():
                    (step / "code").write_text(str(process.returncode if process.returncode >= 0 else 143))
