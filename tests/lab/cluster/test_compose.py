"""The services of compose.yaml work together: their commands, environments and health checks on five machines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.faults.cluster import SMALL
from tests.lab.faults.compose import Services
from tests.lab.faults.lab import HOME, laboratory, until
from tests.support.programs import need
from tests.support.runs.scene import story
from tests.support.scenes import long_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
SECRETS = {"RAY_AUTH_TOKEN": "4e" * 24, "FLOWCREDIT_TOKEN": "57" * 24, "BOARD_PASSWORD": "b0" * 24}


@long_scene
def test_the_services_become_healthy_and_train_as_a_job_with_the_shown_commands(tmp_path: Path) -> None:
    need("redis-server")
    need("wget")
    with laboratory(tmp_path / "lab", machines=5) as lab:
        services = Services(lab, SECRETS)
        for name in services.machines:
            until(lambda: services.is_healthy(name), f"{name} is healthy", seconds=400)  # noqa: B023
        train, log = ("flowcredit", "train", *SMALL, "iterations=6", "--run"), tmp_path / "job.log"
        job = services.start("head", "ray", "job", "submit", "--", *train, f"{HOME}/toy_geneval", log=log)

        def told(path: str, *more: str) -> Any:
            header = f"Authorization: Bearer {SECRETS['FLOWCREDIT_TOKEN']}"
            url = f"http://status:8400/runs{path}"
            said = services.run("node-1", "curl", "-s", "-m", "20", "-H", header, *more, url)
            assert job.poll() in (None, 0), log.read_text()
            return json.loads(said)

        def ask(command: str, phase: str) -> None:
            body = ("-H", "Content-Type: application/json", "-d", json.dumps({"command": command}))
            told("/toy_geneval/commands", *body)
            until(lambda: told("/toy_geneval")["phase"] == phase, f"the run is {phase}", seconds=300)

        until(lambda: told(""), "the status page shows the run", seconds=300)
        ask("pause", "paused")
        services.run("status", "flowcredit", "scale", "toy_geneval", "rollout", "4")
        until(lambda: ready(told("/toy_geneval")) == 4, "four rollout actors are ready", seconds=300)
        ask("resume", "running")
        assert job.wait(600) == 0, log.read_text()
        assert "LoRA " in log.read_text()
        services.run("head", *train, f"{HOME}/alone", "--local")
        home = services.machines["head"].home
        assert story(home / "toy_geneval") == story(home / "alone")


def ready(told: dict[str, Any]) -> int:
    """Rollout actors that are ready, by the status."""
    (pool,) = [pool for pool in told["pools"] if pool["name"] == "rollout"]
    return pool["ready"]
