"""The lines of docs/cluster.md lead from nothing to a first job on four machines, typed as they are shown."""

import json
from pathlib import Path

import pytest

from tests.lab.faults.cluster import require_unwritten
from tests.lab.faults.lab import BUSY, HOME, Machine, laboratory, until
from tests.support.pages import blocks_of
from tests.support.paths import ROOT
from tests.support.programs import need
from tests.support.scenes import long_scene
from tests.support.wheel import unpack_wheel

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@long_scene
def test_the_shown_lines_lead_from_nothing_to_a_first_job(tmp_path: Path) -> None:
    need("redis-server")
    with laboratory(tmp_path / "lab", machines=4) as lab:
        head, *nodes, laptop = lab.machines
        for machine in lab.machines:
            machine.variables |= BUSY
        unpack_wheel(laptop.home / "flowcredit")
        laptop.variables |= {"PYTHONPATH": f"{HOME}/flowcredit"}
        on_head, on_node, on_laptop = blocks_of(ROOT / "docs" / "cluster.md", "From nothing to a first job")

        stays(head, [*on_head, "echo password $PASSWORD"])
        token = (head.home / ".ray" / "auth_token").read_text()
        password = next(line.split()[1] for line in said_by(head).splitlines() if line.startswith("password "))

        def filled(line: str) -> str:
            return line.replace("=TOKEN", f"={token}").replace("PASSWORD", password).replace("HEAD", head.name)

        for node in nodes:
            stays(node, [*map(filled, on_node)])
        setup, submit, status = map(filled, on_laptop)

        def typed(line: str, *, code: int | None = 0) -> str:
            return laptop.run(["bash", "-c", f"{setup}; {line}"], timeout_s=300, code=code)

        until(lambda: "run       mine" in typed(submit, code=None), "a job is taken", seconds=600)
        until(lambda: "iteration" in typed(f"timeout -s INT 30 {status}", code=None), "the run is shown", seconds=900)
        typed("flowcredit scale mine rollout 1")
        until(lambda: ready(typed("flowcredit status mine --json")) == 1, "one rollout actor is left", seconds=300)
        typed("flowcredit stop mine")
        until(lambda: "SUCCEEDED" in typed("ray job list --address http://m1:8265"), "the job has ended", seconds=300)
        assert password not in typed("ray job list --address http://m1:8265")
        for machine in (head, *nodes):
            require_unwritten(machine, password, token)


def stays(machine: Machine, lines: list[str]) -> None:
    """Type lines on a machine, `ray start` again if the machine was too slow for it; return when they are done."""
    again = [f"until {line}; do sleep 2; done" if line.startswith("ray start") else line for line in lines]
    script = "\n".join(["set -e", *[line.replace("HEAD", machine.name) for line in again], "echo all is typed"])
    machine.start(["bash", "-c", f"{script}\nexec sleep infinity"], log=machine.files / "typed.log")
    until(lambda: "all is typed" in said_by(machine), f"the lines are typed on {machine.name}", seconds=600)


def ready(told: str) -> int:
    """Rollout actors that are ready, by the status as JSON."""
    return next(pool["ready"] for pool in json.loads(told)["pools"] if pool["name"] == "rollout")


def said_by(machine: Machine) -> str:
    """What the lines have said."""
    return (machine.files / "typed.log").read_text()
